"""What a benchmark says of where it ran."""

from lightning_turbo.bench.machine import describe_machine


def test_environment_variables_that_change_times_are_named(monkeypatch):
    monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", "1")
    monkeypatch.setenv("SOME_SECRET", "hush")
    facts = describe_machine("cpu")
    assert facts["environment"]["THP_MEM_ALLOC_ENABLE"] == "1"
    assert "SOME_SECRET" not in facts["environment"]
    monkeypatch.delenv("THP_MEM_ALLOC_ENABLE")
    assert "THP_MEM_ALLOC_ENABLE" not in describe_machine("cpu")["environment"]
