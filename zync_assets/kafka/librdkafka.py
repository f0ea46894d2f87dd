"""A client made by librdkafka's public functions (rdkafka.h). confluent-kafka's extension module is linked with librdkafka.

confluent-kafka's clients make a Python object of every record, which costs more than librdkafka's own work. ``zero_copy``
reads and writes with this client instead, and passes librdkafka's memory to Arrow and back.

``Client.poll`` takes librdkafka's reports from a queue of events. librdkafka's own thread calls ``oauth_cb``, and nothing else
in Python, so that a client which is not polled gets its next token in time.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from importlib.metadata import version
from typing import Any, Literal

import numpy as np
from confluent_kafka import (
    KafkaError,  # pyright: ignore[reportAttributeAccessIssue]
    KafkaException,  # pyright: ignore[reportAttributeAccessIssue]
    cimpl,  # pyright: ignore[reportAttributeAccessIssue]
)

from zync_assets.codecs.arrays import obstacle
from zync_assets.errors import SetupError, ZyncError

MESSAGE = np.dtype(
    {
        "names": ["err", "partition", "value", "value_size", "key", "key_size", "offset"],
        "formats": ["<i4", "<i4", "u8", "u8", "u8", "u8", "<i8"],
        "offsets": [0, 16, 24, 32, 40, 48, 56],
        "itemsize": 72,
    }
)
"""``rd_kafka_message_t`` on a machine of 64 bits. ``value`` and ``key`` are addresses, 0 for null."""

_POINTER, _INT, _INT32, _SIZE = ctypes.c_void_p, ctypes.c_int, ctypes.c_int32, ctypes.c_size_t
_TEXT, _LONG = ctypes.c_char_p, ctypes.c_int64
_REPORT = ctypes.CFUNCTYPE(None, _POINTER, _INT, _TEXT, _POINTER)
_REFRESH = ctypes.CFUNCTYPE(None, _POINTER, _TEXT, _POINTER)
_FUNCTIONS: Mapping[str, tuple[Any, list[Any]]] = {
    "rd_kafka_version_str": (_TEXT, []),
    # Configuration
    "rd_kafka_conf_new": (_POINTER, []),
    "rd_kafka_conf_set": (_INT, [_POINTER, _TEXT, _TEXT, _TEXT, _SIZE]),
    "rd_kafka_conf_set_events": (None, [_POINTER, _INT]),
    "rd_kafka_conf_set_error_cb": (None, [_POINTER, _REPORT]),
    "rd_kafka_conf_set_oauthbearer_token_refresh_cb": (None, [_POINTER, _REFRESH]),
    "rd_kafka_conf_enable_sasl_queue": (None, [_POINTER, _INT]),
    "rd_kafka_conf_destroy": (None, [_POINTER]),
    "rd_kafka_new": (_POINTER, [_INT, _POINTER, _TEXT, _SIZE]),
    "rd_kafka_set_log_queue": (_INT, [_POINTER, _POINTER]),
    "rd_kafka_sasl_background_callbacks_enable": (_POINTER, [_POINTER]),
    "rd_kafka_oauthbearer_set_token": (
        _INT,
        [_POINTER, _TEXT, _LONG, _TEXT, ctypes.POINTER(_TEXT), _SIZE, _TEXT, _SIZE],
    ),
    "rd_kafka_oauthbearer_set_token_failure": (_INT, [_POINTER, _TEXT]),
    "rd_kafka_destroy": (None, [_POINTER]),
    # Events
    "rd_kafka_queue_get_main": (_POINTER, [_POINTER]),
    "rd_kafka_queue_poll": (_POINTER, [_POINTER, _INT]),
    "rd_kafka_queue_destroy": (None, [_POINTER]),
    "rd_kafka_event_type": (_INT, [_POINTER]),
    "rd_kafka_event_error": (_INT, [_POINTER]),
    "rd_kafka_event_error_string": (_TEXT, [_POINTER]),
    "rd_kafka_event_error_is_fatal": (_INT, [_POINTER]),
    "rd_kafka_event_log": (
        _INT,
        [_POINTER, ctypes.POINTER(_TEXT), ctypes.POINTER(_TEXT), ctypes.POINTER(_INT)],
    ),
    "rd_kafka_event_message_count": (_SIZE, [_POINTER]),
    "rd_kafka_event_message_array": (_SIZE, [_POINTER, _POINTER, _SIZE]),
    "rd_kafka_event_destroy": (None, [_POINTER]),
    "rd_kafka_fatal_error": (_INT, [_POINTER, _TEXT, _SIZE]),
    # Reading
    "rd_kafka_poll_set_consumer": (_INT, [_POINTER]),
    "rd_kafka_queue_get_consumer": (_POINTER, [_POINTER]),
    "rd_kafka_queue_get_partition": (_POINTER, [_POINTER, _TEXT, _INT32]),
    "rd_kafka_queue_forward": (None, [_POINTER, _POINTER]),
    "rd_kafka_topic_partition_list_new": (_POINTER, [_INT]),
    "rd_kafka_topic_partition_list_add": (_POINTER, [_POINTER, _TEXT, _INT32]),
    "rd_kafka_topic_partition_list_set_offset": (_INT, [_POINTER, _TEXT, _INT32, _LONG]),
    "rd_kafka_topic_partition_list_destroy": (None, [_POINTER]),
    "rd_kafka_assign": (_INT, [_POINTER, _POINTER]),
    "rd_kafka_query_watermark_offsets": (
        _INT,
        [_POINTER, _TEXT, _INT32, ctypes.POINTER(_LONG), ctypes.POINTER(_LONG), _INT],
    ),
    "rd_kafka_consume_batch_queue": (ctypes.c_ssize_t, [_POINTER, _INT, _POINTER, _SIZE]),
    "rd_kafka_consumer_close": (_INT, [_POINTER]),
    "rd_kafka_message_timestamp": (_LONG, [_POINTER, _POINTER]),
    "rd_kafka_message_headers": (_INT, [_POINTER, _POINTER]),
    "rd_kafka_message_destroy": (None, [_POINTER]),
    "rd_kafka_header_cnt": (_SIZE, [_POINTER]),
    "rd_kafka_header_get_all": (_INT, [_POINTER, _SIZE, _POINTER, _POINTER, _POINTER]),
    "rd_kafka_headers_new": (_POINTER, [_SIZE]),
    "rd_kafka_header_add": (_INT, [_POINTER, _POINTER, ctypes.c_ssize_t, _POINTER, ctypes.c_ssize_t]),
    "rd_kafka_headers_destroy": (None, [_POINTER]),
    # Writing
    "rd_kafka_topic_new": (_POINTER, [_POINTER, _TEXT, _POINTER]),
    "rd_kafka_topic_destroy": (None, [_POINTER]),
    "rd_kafka_metadata": (_INT, [_POINTER, _INT, _POINTER, ctypes.POINTER(_POINTER), _INT]),
    "rd_kafka_metadata_destroy": (None, [_POINTER]),
    "rd_kafka_produce_batch": (_INT, [_POINTER, _INT32, _INT, _POINTER, _INT]),
    "rd_kafka_produceva": (_POINTER, [_POINTER, _POINTER, _SIZE]),
    "rd_kafka_error_code": (_INT, [_POINTER]),
    "rd_kafka_error_destroy": (None, [_POINTER]),
    "rd_kafka_purge": (_INT, [_POINTER, _INT]),
}
"""Name → type of the result, types of the arguments, as rdkafka.h declares them."""

NAME_SIZE = 16
"""Bytes between the size of a header's name and the name. A name may contain zero bytes, and no public function returns its
size. ``library`` checks the place."""

_PRODUCER, _CONSUMER = 0, 1
_UNKNOWN = -2
"""The result of ``rd_kafka_conf_set`` for an unknown name: ``RD_KAFKA_CONF_UNKNOWN``."""
_DELIVERY, _LOG, _ERROR = 0x1, 0x4, 0x8
"""Types of events."""

_FIRST_TOKEN = 10.0
"""Seconds that the first token may take. librdkafka connects to no broker without one."""


@cache
def library() -> ctypes.CDLL:
    """librdkafka, its functions declared. SetupError if a function, or the size of a header's name, is not there."""
    if ctypes.sizeof(_POINTER) != 8:
        raise SetupError("zync needs a Python of 64 bits; install one.")
    # The loader looks a name up in the module and in what the module is linked with, wherever that lies.
    functions = ctypes.CDLL(cimpl.__file__)
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(functions, name, None)
        if function is None:
            raise _unusable(f"shows no function {name} of librdkafka")
        function.restype, function.argtypes = result, arguments
    if _name_sizes(functions, (b"a\0b", b"", b"name")) != [3, 0, 4]:
        raise _unusable("keeps the size of a header's name in another place")
    return functions


def _unusable(reason: str) -> SetupError:
    return SetupError(
        f"confluent-kafka {version('confluent-kafka')} {reason} in {cimpl.__file__}; install a wheel of another version:"
        " pip install --only-binary confluent-kafka 'confluent-kafka>=2.16,<3'"
    )


def _name_sizes(functions: ctypes.CDLL, names: Sequence[bytes]) -> list[int]:
    """The sizes of headers' names as they are in memory. Every second header has a null value."""
    headers = functions.rd_kafka_headers_new(len(names))
    sizes: list[int] = []
    try:
        name, value, size = _POINTER(), _POINTER(), _SIZE()
        for place, text in enumerate(names):
            functions.rd_kafka_header_add(headers, text, len(text), b"value" if place % 2 else None, 5 * (place % 2))
            functions.rd_kafka_header_get_all(headers, place, *map(ctypes.byref, (name, value, size)))
            sizes.append(_SIZE.from_address((name.value or 0) - NAME_SIZE).value)
    finally:
        functions.rd_kafka_headers_destroy(headers)
    return sizes


@cache
def quick_library() -> ctypes.PyDLL:
    """The functions of ``library``, called without a release of Python's lock: for calls that wait for nothing.

    A release costs more than such a call.
    """
    functions = ctypes.PyDLL(cimpl.__file__)
    for name in _FUNCTIONS:
        function, declaration = getattr(functions, name), getattr(library(), name)
        function.restype, function.argtypes = declaration.restype, declaration.argtypes
    return functions


def library_version() -> str:
    """The version that librdkafka's own function says. SetupError as ``library``."""
    return library().rd_kafka_version_str().decode()


def way() -> str:
    """How records are read and written, for a person. SetupError as ``library``."""
    problem = obstacle()
    return f"librdkafka {library_version()} directly, {'compiled' if problem is None else f'not compiled: {problem}'}"


def addresses() -> Iterator[tuple[str, int]]:
    """Each function's name and address, for compiled code."""
    for name in _FUNCTIONS:
        address = ctypes.cast(getattr(library(), name), _POINTER).value
        assert address is not None
        yield name, address


class Client:
    """A producer or a consumer, to be closed. KafkaException carries librdkafka's errors, as confluent-kafka's clients do."""

    def __init__(self, kind: Literal["producer", "consumer"], properties: Mapping[str, Any]) -> None:
        """``properties``: librdkafka's by name, and the callbacks ``error_cb``, ``logger`` and ``oauth_cb``, as
        confluent-kafka's clients take them.

        Raises KafkaException for a property that librdkafka refuses, and where ``oauth_cb`` makes no first token.
        """
        self.library = library()
        settings = dict(properties)
        self._on_error: Callable[[KafkaError], None] = settings.pop("error_cb")
        self._logger: Any = settings.pop("logger")
        oauth: Callable[[str], Any] | None = settings.pop("oauth_cb", None)
        tokens = _Tokens(self.library, oauth) if oauth else None
        self._errors: list[tuple[int, str, bool]] = []
        errors = self._errors
        # An error that comes with a partition's messages: librdkafka calls this in the call that takes the messages.
        report = _REPORT(lambda _, code, text, __: errors.append((code, _decode(text), False)))
        conf = _configuration(self.library, settings)
        self.library.rd_kafka_conf_set_events(conf, _LOG | _ERROR | (_DELIVERY if kind == "producer" else 0))
        self.library.rd_kafka_conf_set_error_cb(conf, report)
        if tokens:
            self.library.rd_kafka_conf_set_oauthbearer_token_refresh_cb(conf, tokens.callback)
            self.library.rd_kafka_conf_enable_sasl_queue(conf, 1)
        self.handle: int = _new(self.library, _PRODUCER if kind == "producer" else _CONSUMER, conf)
        if kind == "consumer":
            self.library.rd_kafka_poll_set_consumer(self.handle)
            self._events: int = self.library.rd_kafka_queue_get_consumer(self.handle)
        else:
            self._events = self.library.rd_kafka_queue_get_main(self.handle)
        self.library.rd_kafka_set_log_queue(self.handle, None)
        # Also for a client that nobody closes. librdkafka may call back until its client is gone.
        self._end = weakref.finalize(self, _end, self.library, self.handle, self._events, kind, (report, tokens))
        self._end.atexit = False
        if tokens:
            self.library.rd_kafka_sasl_background_callbacks_enable(self.handle)
            if not tokens.first.wait(_FIRST_TOKEN):
                self.close()
                raise KafkaException(
                    KafkaError(KafkaError.SASL_AUTHENTICATION_FAILED, f"no token within {_FIRST_TOKEN:g} seconds")
                )

    def close(self) -> None:
        """End the client. What waits to be sent is lost."""
        self._end()

    def poll(self, timeout: float) -> None:
        """Handle what librdkafka reports; wait up to ``timeout`` seconds for the first report.

        Raises KafkaException for an error that ends the client.
        """
        wait = int(timeout * 1000)
        while event := self.library.rd_kafka_queue_poll(self._events, wait):
            try:
                self._handle(event, self.library.rd_kafka_event_type(event))
            finally:
                self.library.rd_kafka_event_destroy(event)
            wait = 0
        errors = self._errors.copy()
        self._errors.clear()
        for code, text, fatal in errors:
            if fatal or code == KafkaError._FATAL:
                reason = ctypes.create_string_buffer(512)
                code = self.library.rd_kafka_fatal_error(self.handle, reason, len(reason))
                raise KafkaException(KafkaError(code, _decode(reason.value), True))
            self._on_error(KafkaError(code, text))

    def on_delivery(self, event: int) -> None:
        """Called with the event of delivered messages."""

    def _handle(self, event: int, kind: int) -> None:
        if kind == _DELIVERY:
            self.on_delivery(event)
        elif kind == _ERROR:
            text = _decode(self.library.rd_kafka_event_error_string(event))
            fatal = bool(self.library.rd_kafka_event_error_is_fatal(event))
            self._errors.append((self.library.rd_kafka_event_error(event), text, fatal))
        elif kind == _LOG:
            facility, line, level = _TEXT(), _TEXT(), _INT()
            self.library.rd_kafka_event_log(event, facility, line, level)
            self._logger.log(level.value, "%s %s", _decode(facility.value), _decode(line.value))


class _Tokens:
    """The callback by which librdkafka asks for a token."""

    def __init__(self, functions: ctypes.CDLL, make: Callable[[str], Any]) -> None:
        self._functions, self._make = functions, make
        self.first = threading.Event()
        self.callback = _REFRESH(self._refresh)

    def _refresh(self, handle: int, config: bytes | None, _: int | None) -> None:
        # Nobody is above this call to catch an error: librdkafka reports it and asks again.
        try:
            # A principal and extensions may be left out.
            token_parts: list[Any] = [*self._make(_decode(config)), "", {}]
            token, until, principal, extensions = token_parts[:4]
            pairs = [text.encode() for pair in extensions.items() for text in pair]
            reason = ctypes.create_string_buffer(512)
            code = self._functions.rd_kafka_oauthbearer_set_token(
                handle,
                token.encode(),
                int(until * 1000),
                principal.encode(),
                (_TEXT * len(pairs))(*pairs),
                len(pairs),
                reason,
                len(reason),
            )
            problem = _decode(reason.value) if code else None
        except ZyncError as error:
            problem = str(error)
        except Exception as error:
            # An error of somebody else's may hold a secret.
            problem = type(error).__name__
        if problem is None:
            self.first.set()
        else:
            self._functions.rd_kafka_oauthbearer_set_token_failure(handle, problem.encode())


def refused_properties(properties: Mapping[str, str]) -> dict[str, bool]:
    """The properties that librdkafka refuses → whether it knows their names. Asks no broker."""
    functions = library()
    conf: int = functions.rd_kafka_conf_new()
    try:
        results = {
            name: functions.rd_kafka_conf_set(conf, name.encode(), value.encode(), None, 0)
            for name, value in properties.items()
        }
    finally:
        functions.rd_kafka_conf_destroy(conf)
    return {name: result != _UNKNOWN for name, result in results.items() if result}


def _configuration(functions: ctypes.CDLL, properties: Mapping[str, Any]) -> int:
    """A ``rd_kafka_conf_t`` with these properties."""
    reason = ctypes.create_string_buffer(512)
    conf: int = functions.rd_kafka_conf_new()
    # A plugin brings properties of its own. The log goes to the queue of events.
    first = {name: properties[name] for name in ("debug", "plugin.library.paths") if name in properties}
    for name, value in {**first, **properties, "log.queue": True}.items():
        if functions.rd_kafka_conf_set(conf, name.encode(), str(value).encode(), reason, len(reason)):
            functions.rd_kafka_conf_destroy(conf)
            raise KafkaException(KafkaError(KafkaError._INVALID_ARG, _decode(reason.value)))
    return conf


def _new(functions: ctypes.CDLL, kind: int, conf: int) -> int:
    """A client's ``rd_kafka_t``, which owns ``conf``."""
    reason = ctypes.create_string_buffer(512)
    handle: int | None = functions.rd_kafka_new(kind, conf, reason, len(reason))
    if handle is None:
        functions.rd_kafka_conf_destroy(conf)
        raise KafkaException(KafkaError(KafkaError._INVALID_ARG, _decode(reason.value)))
    return handle


def _end(functions: ctypes.CDLL, handle: int, events: int, kind: str, callbacks: object) -> None:
    if kind == "consumer":
        functions.rd_kafka_consumer_close(handle)
    functions.rd_kafka_queue_destroy(events)
    functions.rd_kafka_destroy(handle)


def _decode(text: bytes | None) -> str:
    return (text or b"").decode(errors="replace")
