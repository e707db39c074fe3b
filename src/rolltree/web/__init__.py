"""What the servers of rolltree share: who is answered, limits of requests, JSON errors, the start.

`guard` and `limits` need no web framework, `answers` needs starlette and `start` uvicorn. A
cluster's servers run on aiohttp, which every training has, and use only `guard`.
"""
