"""Several small clients from one start: processes forked before any driver call, which execute single expressions."""

import json
import os
import signal
import sys

from driver_client import *  # noqa: F403  (members are asked in its words, and so are those who talk to them)


class Member:
    """A separate process; its names are those of `driver_client`, and what it was asked to remember."""

    def __init__(self, **environment):
        ours, theirs = os.pipe(), os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(ours[1])
            os.close(theirs[0])
            self._serve(os.fdopen(ours[0]), os.fdopen(theirs[1], "w"), environment)
        os.close(ours[0])
        os.close(theirs[1])
        self._to, self._from = os.fdopen(ours[1], "w"), os.fdopen(theirs[0])

    @staticmethod
    def _serve(questions, answers, environment):
        os.environ.update(environment)
        names = dict(globals())
        for line in questions:
            kind, text = json.loads(line)
            if kind == "leave":
                os._exit(0)
            try:
                answer = exec(text, names) if kind == "do" else eval(text, names)
            except Exception as error:  # noqa: BLE001  (the asker sees it as the answer)
                answer = f"{type(error).__name__}: {error}"
            answers.write(json.dumps(answer) + "\n")
            answers.flush()
        os._exit(0)

    def send(self, kind, text):
        self._to.write(json.dumps([kind, text]) + "\n")
        self._to.flush()

    def answer(self):
        line = self._from.readline()
        return json.loads(line) if line else "gone"

    def ask(self, expression):
        """The value of an expression in the member (anything that JSON can carry); "gone" when the
        process has ended.
        """
        self.send("ask", expression)
        return self.answer()

    def do(self, statements):
        """Runs statements in the member; None on success, else the error."""
        self.send("do", statements)
        return self.answer()

    def kill(self, number=signal.SIGKILL):
        os.kill(self.pid, number)
        if number == signal.SIGKILL:
            os.waitpid(self.pid, 0)

    def leave(self):
        """Ends the member and returns its exit status.

        It must be asked, because younger members hold its pipe's other end, too.
        """
        self.send("leave", "")
        return os.waitpid(self.pid, 0)[1]


def crew(count, **environment):
    return [Member(**environment) for _ in range(count)]


sys.stdout.reconfigure(line_buffering=True)
