"""Records of encrypted bytes, beside an AES-GCM and an HKDF written down here from their standards."""

from __future__ import annotations

import hmac
import os
import struct
import threading

import pytest

from moesaic.core.errors import ConnectionLost, DamagedMessage
from moesaic.transport import sealing
from moesaic.transport.sealing import (
    HEADER,
    KEY_MESSAGES,
    MAX_MESSAGES,
    OVERHEAD,
    RECORD,
    TAG,
    Opener,
    Sealer,
    derive_client_keys,
)

SECRET = bytes(range(32))
"""Of a direction."""

# ---- the standards: AES (FIPS 197), GCM (NIST SP 800-38D), HKDF (RFC 5869)


def times(a: int, b: int) -> int:
    """A product in AES's field of 256 elements."""
    product = 0
    while b:
        product ^= a * (b & 1)
        a, b = (a << 1) ^ (0x11B * (a >> 7)), b >> 1
    return product


def substitute(byte: int) -> int:
    """AES's S-box: the inverse in the field, then a fixed map of its bits."""
    inverse = next((x for x in range(256) if times(byte, x) == 1), 0)
    spread = inverse * 0x101
    return 0x63 ^ (inverse ^ (spread >> 4) ^ (spread >> 5) ^ (spread >> 6) ^ (spread >> 7)) & 0xFF


BOX = [substitute(byte) for byte in range(256)]


def round_keys(key: bytes) -> list[bytes]:
    words = [key[i : i + 4] for i in range(0, 32, 4)]
    constant = 1
    for i in range(8, 60):
        word = words[-1]
        if i % 8 == 0:
            word = bytes(BOX[byte] for byte in word[1:] + word[:1])
            word, constant = bytes([word[0] ^ constant]) + word[1:], times(constant, 2)
        elif i % 8 == 4:
            word = bytes(BOX[byte] for byte in word)
        words.append(bytes(a ^ b for a, b in zip(words[i - 8], word, strict=True)))
    return [b"".join(words[i : i + 4]) for i in range(0, 60, 4)]


def aes(keys: list[bytes], block: bytes) -> bytes:
    state = [a ^ b for a, b in zip(block, keys[0], strict=True)]
    for number, key in enumerate(keys[1:], start=1):
        state = [BOX[state[(4 * (i // 4) + 5 * (i % 4)) % 16]] for i in range(16)]
        if number < 14:
            mixed = []
            for i in range(0, 16, 4):
                a = state[i : i + 4]
                mixed += [
                    times(a[j], 2) ^ times(a[(j + 1) % 4], 3) ^ a[(j + 2) % 4] ^ a[(j + 3) % 4]
                    for j in range(4)
                ]
            state = mixed
        state = [a ^ b for a, b in zip(state, key, strict=True)]
    return bytes(state)


def ghash(key: int, data: bytes) -> int:
    total = 0
    for i in range(0, len(data), 16):
        total ^= int.from_bytes(data[i : i + 16], "big")
        product, factor = 0, key
        for bit in range(127, -1, -1):
            product ^= factor * (total >> bit & 1)
            factor = (factor >> 1) ^ ((0xE1 << 120) * (factor & 1))
        total = product
    return total


def gcm(key: bytes, nonce: bytes, plain: bytes) -> bytes:
    """The ciphertext and its tag."""
    keys = round_keys(key)
    stream = b"".join(aes(keys, nonce + struct.pack(">I", 2 + i)) for i in range((len(plain) + 15) // 16))
    text = bytes(a ^ b for a, b in zip(plain, stream, strict=False))
    sizes = struct.pack(">QQ", 0, 8 * len(plain))
    tag = ghash(int.from_bytes(aes(keys, bytes(16)), "big"), text + bytes(-len(text) % 16) + sizes)
    return text + (tag ^ int.from_bytes(aes(keys, nonce + struct.pack(">I", 1)), "big")).to_bytes(16, "big")


def expanded(pseudorandom: bytes, info: bytes) -> bytes:
    """The first 32 bytes of HKDF-Expand."""
    return hmac.digest(pseudorandom, info + b"\x01", "sha256")


def by_hand(number: int, plain: bytes) -> bytes:
    """The message with this number."""
    key = expanded(SECRET, b"moesaic key" + struct.pack("<Q", number // KEY_MESSAGES))
    return gcm(key, bytes(4) + struct.pack("<Q", number), plain)


def test_the_gcm_of_this_file_is_the_standards() -> None:
    """Test cases 14 and 16 of "The Galois/Counter Mode of Operation", the latter without its AAD's tag."""
    assert gcm(bytes(32), bytes(12), bytes(16)).hex() == (
        "cea7403d4d606b6e074ec5d3baf39d18" + "d0d1c8a799996bf0265b98b5d48ab919"
    )
    key = bytes.fromhex("feffe9928665731c6d6a8f9467308308" * 2)
    plain = bytes.fromhex("d9313225f88406e5a55909c5aff5269a86a7a9531534f7da2e4c303d8a318a72")
    text = gcm(key, bytes.fromhex("cafebabefacedbaddecaf888"), plain)
    assert text[:32].hex() == "522dc1f099567d07f47f37a32a84427d643a8cdcbfe5c0c97598a2bd2555d1aa"


# ---- records


def seal(sealer: Sealer, plain: bytes) -> bytes:
    into = memoryview(bytearray(len(plain) + OVERHEAD))
    assert sealer.seal(memoryview(plain), into) == len(into)
    return bytes(into)


def opened(opener: Opener, record: bytes) -> bytes:
    count = opener.length(memoryview(record)[:HEADER])
    into = memoryview(bytearray(count))
    opener.open(memoryview(record)[HEADER : HEADER + count + TAG], into)
    return bytes(into)


def damaged(opener: Opener, record: bytes) -> str:
    with pytest.raises(DamagedMessage) as raised:
        opened(opener, record)
    return str(raised.value)


@pytest.mark.parametrize("first", [0, 1234, KEY_MESSAGES - 3, 5 * KEY_MESSAGES - 1, MAX_MESSAGES - 4])
def test_records_are_what_the_standards_say(first: int) -> None:
    """Also where the key changes, between two records or within one."""
    sealer, opener = Sealer(SECRET, first), Opener(SECRET, first)
    for number, plain in enumerate([b"a message of 36 bytes, in two blocks", b"x"]):
        record = seal(sealer, plain)
        at = first + 2 * number
        assert record == by_hand(at, struct.pack("<I", len(plain))) + by_hand(at + 1, plain)
        assert opened(opener, record) == plain


def test_keys_are_what_the_standards_say() -> None:
    secret, nonces, context = b"the cluster's secret", os.urandom(64), b"what both agreed on"
    keys = derive_client_keys(secret, nonces, context)
    extracted = hmac.digest(nonces, secret, "sha256")
    assert keys.sending == expanded(extracted, b"moesaic client to server" + context)
    assert keys.receiving == expanded(extracted, b"moesaic server to client" + context)
    assert keys.swap() == (keys.receiving, keys.sending)


def test_other_connections_have_other_keys() -> None:
    secret, nonces = b"the cluster's secret", bytes(64)
    found = [
        derive_client_keys(secret, nonces, b""),
        derive_client_keys(secret, b"\x01" + nonces[1:], b""),
        derive_client_keys(secret, nonces, b"other terms"),
        derive_client_keys(secret + b"!", nonces, b""),
    ]
    assert len({key for keys in found for key in keys}) == 2 * len(found)


def test_every_changed_bit_is_found() -> None:
    record = seal(Sealer(SECRET), b"tokens")
    for bit in range(8 * len(record)):
        changed = bytearray(record)
        changed[bit // 8] ^= 1 << bit % 8
        why = damaged(Opener(SECRET), bytes(changed))
        assert why == "encrypted record 1 is damaged: it was changed, lost, repeated or moved on the way"


def test_records_open_only_in_their_place() -> None:
    sealer = Sealer(SECRET)
    one, two, three = (seal(sealer, text) for text in (b"one", b"two", b"three"))
    for before, wrong in (([], two), ([one], one), ([one], three), ([one, two], one)):
        opener = Opener(SECRET)
        for record in before:
            opened(opener, record)
        assert damaged(opener, wrong).startswith(f"encrypted record {len(before) + 1} is damaged")
    other = Opener(bytes(32))
    assert "record 1 is damaged" in damaged(other, one)


def test_nothing_opens_after_a_damaged_record() -> None:
    sealer, opener = Sealer(SECRET), Opener(SECRET)
    one, two = seal(sealer, b"one"), seal(sealer, b"two")
    first = damaged(opener, two)
    assert damaged(opener, one) == damaged(opener, two) == first


def test_the_largest_record_and_the_sizes_that_are_refused() -> None:
    sealer, opener = Sealer(SECRET), Opener(SECRET)
    largest = os.urandom(RECORD)
    assert opened(opener, seal(sealer, largest)) == largest
    for size in (0, RECORD + 1):
        with pytest.raises(ValueError, match=f"a record of {size} bytes; allowed: 1 to {RECORD}"):
            seal(sealer, bytes(size))
    assert opened(opener, seal(sealer, b"next")) == b"next", "a refused size takes no number"


@pytest.mark.parametrize("size", [0, RECORD + 1, 2**32 - 1])
def test_sizes_of_a_peer_that_knows_the_key(size: int) -> None:
    with pytest.raises(DamagedMessage, match=f"it carries {size} bytes; allowed: 1 to {RECORD}"):
        Opener(SECRET).length(memoryview(by_hand(0, struct.pack("<I", size))))


def test_numbers_end_before_they_repeat() -> None:
    for first in (MAX_MESSAGES - 2, MAX_MESSAGES - 1, MAX_MESSAGES):
        sealer, opener = Sealer(SECRET, first), Opener(SECRET, first)
        if first == MAX_MESSAGES - 2:
            assert opened(opener, seal(sealer, b"the last one")) == b"the last one"
        for _ in range(2):
            with pytest.raises(ConnectionLost, match=f"has carried {MAX_MESSAGES} messages"):
                seal(sealer, b"one more")
        with pytest.raises(ConnectionLost, match=f"has carried {MAX_MESSAGES} messages"):
            opened(opener, by_hand(MAX_MESSAGES - 1, struct.pack("<I", 4)) + bytes(20))


def test_threads_that_seal_at_once_share_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """No part of moesaic does that. If one did, answers would stop and no key would be used twice."""
    monkeypatch.setattr(sealing, "KEY_MESSAGES", 64)
    cipher = sealing._Cipher(SECRET, 0)
    taken: list[bytes] = []

    def take() -> None:
        taken.extend(cipher.next()[1] for _ in range(2000))

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(taken)) == len(taken) == 8000
