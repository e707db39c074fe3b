"""The web page on stored runs: it reads the store and computes nothing of its own.

`serve` starts it, `app` guards and routes, `api` answers in JSON; `static/` is the page.
"""
