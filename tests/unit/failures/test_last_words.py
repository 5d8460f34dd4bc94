"""A worker's last words, shortened for the status and in one line."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpu_training_operator.domain.failures.messages import find_error, shorten

IMPORT = """Traceback (most recent call last):
  File "/app/reg.py", line 1, in <module>
    import lightning
ModuleNotFoundError: No module named 'lightning'"""
RAGGED = """Traceback (most recent call last):
  File "/app/mytask.py", line 7, in batches
    yield from loader
  File "/usr/lib/python3.12/site-packages/torch/utils/data/dataloader.py", line 732, in __next__
    data = self._next_data()
           ^^^^^^^^^^^^^^^^^
  File "/opt/tpu_trainer/loop/loop.py", line 3, in step
    return collate(batch, collate_fn_map=default_collate_fn_map)
RuntimeError: stack expects each tensor to be equal size
"""
CHAINED = f"""{IMPORT}

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "<frozen importlib._bootstrap>", line 1, in _load
  File "/app/train.py", line 20, in main
    raise KeyError("label")
KeyError: 'label'"""


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", ""),
        ("cannot read the bucket", "cannot read the bucket"),
        ("step 1\nstep 2\n  no such file  \n\n", "no such file"),
        (IMPORT, "ModuleNotFoundError: No module named 'lightning' (reg.py:1)"),
        (RAGGED, "RuntimeError: stack expects each tensor to be equal size (mytask.py:7)"),
        # A dataclass's own __init__.
        (
            'Traceback (most recent call last):\n  File "/app/train.py", line 5, in task\n    return Task()\n'
            '  File "<string>", line 20, in __init__\nValueError: no loss',
            "ValueError: no loss (train.py:5)",
        ),
        (CHAINED, "KeyError: 'label' (train.py:20)"),
        (
            RAGGED + "  a message of\ntwo lines",
            "RuntimeError: stack expects each tensor to be equal size (mytask.py:7)",
        ),
        (
            "the worker was ended by SIGSEGV (exit code 139): step 1\nstep 2",
            "the worker was ended by SIGSEGV (exit code 139); its last line: step 2",
        ),
        (
            "the worker was killed (exit code 137): " + IMPORT,
            "ModuleNotFoundError: No module named 'lightning' (reg.py:1)",
        ),
        ('Thread 1:\n  File "/app/a.py", line 1, in f\n    wait()', "wait()"),
        ("x" * 400, "x" * 297 + "..."),
        (IMPORT.replace("reg.py", "r" * 400), "ModuleNotFoundError: No module named 'lightning'"),
    ],
)
def test_the_line_has_the_error_and_its_place_in_the_users_code(text: str, line: str) -> None:
    assert find_error(text) == line


def test_a_text_that_fits_is_unchanged() -> None:
    assert shorten(RAGGED, len(RAGGED)) == RAGGED


def test_frames_of_libraries_go_before_the_users() -> None:
    assert shorten(RAGGED, len(RAGGED) - 1) == (
        "Traceback (most recent call last):\n"
        '  File "/app/mytask.py", line 7, in batches\n'
        "    yield from loader\n"
        "RuntimeError: stack expects each tensor to be equal size"
    )


def test_a_long_text_is_cut_between_lines() -> None:
    assert shorten("spam spam\nspam spam\nOSError: the disk is full", 39) == "...\nspam spam\nOSError: the disk is full"


@given(text=st.text() | st.just(RAGGED * 3), room=st.integers(0, 300))
def test_no_text_exceeds_its_room_and_a_line_stays_one_line(text: str, room: int) -> None:
    assert len(shorten(text, room)) <= room
    assert len(find_error(text)) <= 300
    assert "\n" not in find_error(text)
