"""What models write, read as messages: formats of reasoning and of tool calls, a row each.

`rows` has the formats, `reader` and `machine` read an answer, `calls` finds the blocks of calls.
`tagged`, `python`, `gemma` and `harmony` are grammars that only some models need. `schema` decides
what an argument without quotes is.
"""
