"""The gateway's sessions in SQLite: what was written is on disk before the write returns.

The account of sampled tokens is in the same file: tokens recorded in sessions, tokens in traces, and tokens lost.
"""

from __future__ import annotations

from collections import Counter as Tally

from prometheus_client import Counter

from services.http.database import Database, Statement

_SCHEMA = """
CREATE TABLE IF NOT EXISTS sessions (
    id TEXT PRIMARY KEY,
    request TEXT NOT NULL,      -- CreateSessionRequest as JSON
    created REAL NOT NULL,      -- Unix seconds
    finished INTEGER NOT NULL DEFAULT 0,
    reward REAL,
    reason TEXT,
    refused TEXT                -- of a finished session: the limit over which its last call was refused
);
CREATE TABLE IF NOT EXISTS calls (
    number INTEGER PRIMARY KEY AUTOINCREMENT,  -- in the order in which the calls were answered
    session TEXT NOT NULL,
    record BLOB NOT NULL        -- Call.record as JSON
);
CREATE INDEX IF NOT EXISTS calls_of_session ON calls (session, number);
CREATE TABLE IF NOT EXISTS lost (session TEXT NOT NULL, reason TEXT NOT NULL, tokens INTEGER NOT NULL);
CREATE INDEX IF NOT EXISTS lost_of_session ON lost (session);
CREATE TABLE IF NOT EXISTS account (name TEXT PRIMARY KEY, tokens INTEGER NOT NULL) WITHOUT ROWID;
"""


SAMPLED = Counter("gateway_sampled_tokens", "Sampled tokens recorded in sessions.")
TRACED = Counter("gateway_trace_tokens", "Sampled tokens in the traces of finished sessions.")
LOST = Counter("gateway_lost_tokens", "Sampled tokens that no trace has, by reason.", ["reason"])

RECORDED_TOKENS, TRACED_TOKENS, _LOST = "recorded", "traced", "lost:"
_METRICS = {RECORDED_TOKENS: SAMPLED, TRACED_TOKENS: TRACED}
_READ = "SELECT name, tokens FROM account"
_ADD = "INSERT INTO account VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET tokens = tokens + excluded.tokens"

LOST_WITH_SESSION = ("deleted", "expired", "abandoned")
"""Loss reasons whose tokens were counted as recorded before, because their session was removed unfinished."""


class Store(Database):
    """The database of the sessions, and the account of all sampled tokens since its directory was made."""

    name = "gateway"
    variable = "GATEWAY_DIR"
    format = 3
    schema = _SCHEMA
    unwritten = "the gateway cannot write its sessions"
    loss = "the open episodes are lost, and their prompts are played again"
    _tokens: Tally[str]

    async def open(self) -> None:
        """Open the database, and read the account; raises as Database.open."""
        await super().open()
        self._tokens = Tally(dict(await self.read(_READ)))

    async def enter(self, name: str, tokens: int, *change: Statement) -> None:
        """Write a change with the tokens that it records or traces.

        Raises:
            ProblemError: 507, the disk refuses to write; tokens to record are then lost as ``unwritten``.
        """
        try:
            await self.write(*change, (_ADD, (name, tokens)))
        except Exception:
            if name == RECORDED_TOKENS:
                self._count(f"{_LOST}unwritten", tokens)
            raise
        self._count(name, tokens)

    async def lose(self, reason: str, tokens: int, *change: Statement) -> None:
        """Write a change that loses tokens; raises as ``enter`` does."""
        await self.enter(f"{_LOST}{reason}", tokens, *change)

    def _count(self, name: str, tokens: int) -> None:
        self._tokens[name] += tokens
        (_METRICS.get(name) or LOST.labels(name.removeprefix(_LOST))).inc(tokens)

    @property
    def engine_tokens(self) -> int:
        """The tokens that engines sampled, as far as they reached the gateway."""
        lost = self.lost
        return self._tokens[RECORDED_TOKENS] + lost.total() - sum(lost[reason] for reason in LOST_WITH_SESSION)

    @property
    def trace_tokens(self) -> int:
        """The sampled tokens in traces, each counted in the one sequence that is trained on it."""
        return self._tokens[TRACED_TOKENS]

    @property
    def lost(self) -> Tally[str]:
        """The sampled tokens that no trace has, by reason."""
        lost = {name: tokens for name, tokens in self._tokens.items() if name.startswith(_LOST) and tokens}
        return Tally({name.removeprefix(_LOST): tokens for name, tokens in lost.items()})
