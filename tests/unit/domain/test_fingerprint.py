import pytest

from postroom.domain.integrity import fingerprint, normalize


@pytest.mark.parametrize(
    ("error", "other"),
    [
        ("timeout after 30 ms", "timeout after 4711 ms"),
        (
            "order 01977420-dc00-7f2a-9944-c9c3269e0d37 is gone",
            "order 01977422-3284-789c-a572-72117474659c is gone",
        ),
        ("fault at 0x7f00ed34", "Fault at  0xdeadbeef"),
        ("blob 9f86d081884c7d65 missing", "blob e3b0c44298fc1c14 missing"),
        ("version 1.2.3 refused", "version 10.4 refused"),
    ],
)
def test_errors_that_differ_only_in_numbers_and_ids_have_one_fingerprint(error: str, other: str) -> None:
    assert fingerprint("max_attempts", error) == fingerprint("max_attempts", other)


@pytest.mark.parametrize("other", ["timeout after 30 s", "30 ms", "", None])
def test_errors_that_say_something_else_have_another_fingerprint(other: str | None) -> None:
    assert fingerprint("max_attempts", "timeout after 30 ms") != fingerprint("max_attempts", other)


def test_the_reason_is_part_of_the_fingerprint() -> None:
    assert fingerprint("max_attempts", "boom") != fingerprint("rejected", "boom")


def test_words_that_look_like_hex_are_kept() -> None:
    assert normalize("defaced facade 12") == "defaced facade #"
