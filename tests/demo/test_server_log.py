"""The log's last words and the plugin's reports."""

from vllm_moe_ep.demo.server_log import last_words, replaced_layers

PREFIX = "(Worker_TP1_EP1 pid=15986) INFO 12-01 12:39:12 [load_report.py:56] "


def test_reports_of_all_workers() -> None:
    log = (
        f"{PREFIX}static-ep: vllm-moe-ep 0.1.0, using the layer\n"
        f"{PREFIX}static-ep: replaced 2 of 3 DeepSeek MoE layers with the layer; 8 of 16 experts\n"
        f"{PREFIX}something else\n"
        f"{PREFIX}static-ep: replaced 3 of 3 DeepSeek MoE layers with the layer\n"
    )
    reports = replaced_layers(log)
    assert [(r.num_replaced, r.num_layers) for r in reports] == [(2, 3), (3, 3)]
    assert reports[1].text == "static-ep: replaced 3 of 3 DeepSeek MoE layers with the layer"


def test_each_cause_once_with_its_explanation() -> None:
    error = "(EngineCore pid=1) ERROR 12-01 12:41:44 [core.py:9] "
    log = (
        f"{error}Traceback (most recent call last):\n"
        f'{error}  File "x.py", line 1, in f\n'
        f"{error}pydantic_core.ValidationError: 1 validation error for VllmConfig\n"
        f"{error}  Value error, add --enable-expert-parallel [type=value_error]\n"
        f"{error}pydantic_core.ValidationError: 1 validation error for VllmConfig\n"
        "RuntimeError: Engine core initialization failed. See root cause above.\n"
    )
    assert last_words(log).splitlines() == [
        "  pydantic_core.ValidationError: 1 validation error for VllmConfig",
        "    Value error, add --enable-expert-parallel [type=value_error]",
    ]


def test_command_line_error() -> None:
    log = "usage: vllm serve [options]\nvllm serve: error: argument --moe-backend: unknown\n"
    assert last_words(log) == "  vllm serve: error: argument --moe-backend: unknown"


def test_last_lines_where_no_error_is_named() -> None:
    log = "\n".join(f"line {n}" for n in range(20)) + "\n\n"
    assert last_words(log).split() == " ".join(f"line {n}" for n in range(12, 20)).split()
