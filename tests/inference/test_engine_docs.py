"""The example of docs/engine.md runs, on the tiny model."""

import textwrap

from docs_kit import blocks


async def test_the_example_samples_ids_and_logprobs():
    (example,) = blocks("engine.md")
    body = example.replace("smollm2-135m", "tiny") + "await client.aclose()\nreturn response\n"
    names = {}
    exec(f"async def example():\n{textwrap.indent(body, '    ')}", names)
    response = await names["example"]()
    assert 1 <= len(response.completion_ids) <= 8
    assert len(response.logprobs) == len(response.completion_ids)
