"""The web page of stored runs, which shows what `records` computes from the store.

`serve` starts it, `app` guards and routes requests, `api` answers in JSON; `static/` is the page.
"""
