"""Cases that do not play here yet as they play on the real package, and which fields differ.

Only while the work on them lasts: a case in this list that passes fails the test.
"""

KNOWN_FAILURES: dict[str, str] = {
    "by_hand": "again.advantage, before.advantage, before.completion",
    "command_line": "defaults, endpoint, endpoint, files",
    "datasets_of": "logger",
    "errors_of_load": "owner",
    "generate_forms": "dict.error, empty.error, empty.keys",
    "reasoning_gym_env": "environment.rubric.funcs[], metadata.avg_metrics.format_reward, ..",
    "reasoning_gym_several": "environment.rubric.funcs[], metadata.avg_metrics.check_answer_re..",
    "surface": "parsers.xml_parser.XMLParser.format.parameters, scripts.eval.get..",
    "turns_reads_state": "report.advantage, report.completion, report.keys",
    "turns_reads_state_info": "report.advantage, report.completion, report.keys",
}
