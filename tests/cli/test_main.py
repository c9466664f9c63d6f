"""The console script: subcommands, exit codes and messages."""

import pytest

from vllm_moe_ep.cli.main import main


def test_env_prints_the_values_in_force(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VLLM_MOE_EP_EXPERTS", "dense")
    assert main(["env", "--additional-config", '{"moe_ep": {"gather": "fp32"}}']) == 0
    printed = capsys.readouterr().out
    assert "VLLM_MOE_EP_EXPERTS = dense (default auto)" in printed
    assert "VLLM_MOE_EP_GATHER = fp32 (default bytes)" in printed


@pytest.mark.parametrize("text", ["{", "[1]", '{"moe_ep": {"gathr": "fp32"}}'])
def test_env_refuses_a_bad_additional_config(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "--additional-config", text]) == 2
    assert "vllm-moe-ep env: " in capsys.readouterr().err


def test_unknown_command_exits_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["serv"])
    assert caught.value.code == 2
    assert "serv" in capsys.readouterr().err


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in ("env", "make-model", "demo"))
