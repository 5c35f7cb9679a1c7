"""What ends a conversion."""

from __future__ import annotations

from ...schemas.errors import StreamrftError


class ConvertFailed(StreamrftError):
    """A checkpoint was not converted and nothing of it left behind; the message names the file."""
