"""What is said of the machine."""

from lightning_turbo.measure import describe_machine


def test_environment_variables_that_change_times_are_named(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setenv("THP_MEM_ALLOC_ENABLE", "1")
        patch.setenv("SOME_SECRET", "hush")
        facts = describe_machine("cpu")
    assert facts["environment"]["THP_MEM_ALLOC_ENABLE"] == "1"
    assert "SOME_SECRET" not in facts["environment"]
    assert facts["cores"] >= 1
    assert facts["versions"]["torch"]
