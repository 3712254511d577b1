"""What is kept of recent sequences, so that a prompt that continues, repeats or forks one is not computed again."""

from services.worker.sessions.cut import cut_prompt
from services.worker.sessions.disk import SessionDisk
from services.worker.sessions.identity import session_root
from services.worker.sessions.segment import KeptSegment
from services.worker.sessions.store import SessionStore, Trail

__all__ = ["KeptSegment", "SessionDisk", "SessionStore", "Trail", "cut_prompt", "session_root"]
