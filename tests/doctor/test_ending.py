"""Ending the program after the report is done, and after any error."""

from contextlib import ExitStack

import pytest

from lightning_turbo.doctor import ending


class EndedError(BaseException):
    """Raised instead of ending the process."""


@pytest.mark.parametrize(("raised", "status"), [(None, 7), (KeyboardInterrupt, 1), (ValueError("mine"), 1)])
def test_the_program_is_ended_after_any_error(raised, status, monkeypatch, capsys):
    def end_process(status):
        raise EndedError(status)

    def at_end(given):
        assert given == 0
        if raised:
            raise raised
        return 7

    monkeypatch.setattr(ending, "end_process", end_process)
    put_in, closed = ExitStack(), []
    put_in.callback(closed.append, True)
    with pytest.raises(EndedError) as error, ending.ended_by(at_end, put_in):
        ending.end_program()
    assert error.value.args == (status,)
    assert closed == ([] if raised else [True])
    assert ("Traceback" in capsys.readouterr().err) == bool(raised)
