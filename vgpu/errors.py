"""Errors that end a command with a sentence for its user, never with a traceback."""


class UserError(Exception):
    """`str()` is one sentence: what is wrong, where, what is allowed or what to do."""

    def __init__(self, sentence: str, exit_code: int = 1) -> None:
        super().__init__(sentence)
        self.exit_code = exit_code
