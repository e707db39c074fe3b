"""Cases that do not play here yet as they play on the real package, and which fields differ.

Only while the work on them lasts: a case in this list that passes fails the test.
"""

KNOWN_FAILURES: dict[str, str] = {
    "by_hand": "again.advantage, before.advantage, before.completion",
    "command_line": "defaults, endpoint, endpoint, files",
    "continuation_quality_numbered": "scoring_errors",
    "datasets_of": "logger",
    "errors_of_load": "owner",
    "example_data": "no split.error",
    "failing": "all",
    "generate_forms": "dict.error, empty.error, empty.keys",
    "logged": "handlers, level, propagate",
    "math_python": "environment, load, results",
    "mixed_nested": "advantage",
    "reasoning_gym_env": "environment.rubric.funcs[], metadata.avg_metrics.format_reward, ..",
    "reasoning_gym_several": "environment.rubric.funcs[], metadata.avg_metrics.check_answer_re..",
    "results_by_hand": "printed",
    "scored_groups": "scoring_errors",
    "scored_judge_bad_prompt": "scoring_errors",
    "scored_judge_fails": "scoring_errors",
    "states_by_hand": "empty.keywords.error, group.group[].advantage, group.keywords.ad..",
    "surface": "parsers.xml_parser.XMLParser.format.parameters, scripts.eval.get..",
    "tool_schemas": "keywords.error, merge.error, move.error",
    "toxicity_explanation": "scoring_errors",
    "turns_reads_state": "report.advantage, report.completion, report.keys",
    "turns_reads_state_info": "report.advantage, report.completion, report.keys",
    "wordle": "state.metrics",
}
