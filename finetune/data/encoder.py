"""Examples to token rows: render, tokenize, mask, and cut or drop what is too long."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from finetune.data.dataset import COUNTS, TokenRow
from finetune.data.formats import Conversation, Document, Example
from finetune.data.options import DEFAULT_CHAT_OPTIONS, ChatOptions, Overlong, TrainOn
from finetune.data.overlong import cut_conversation, split_document
from finetune.data.replies import ReplyFinder
from finetune.data.template import Encoded, TurnShape, encode_texts, read_turn_shape, render, stop_token_ids
from finetune.errors import DataError


class RowEncoder:
    """The rows and counts of one data set as they grow, example by example."""

    def __init__(
        self,
        tokenizer: Any,
        max_seq_length: int | None,
        overlong: Overlong,
        train_on: TrainOn,
        chat: ChatOptions = DEFAULT_CHAT_OPTIONS,
    ) -> None:
        self.tokenizer = tokenizer
        self.max_seq_length = max_seq_length
        self.overlong = overlong
        self.train_on = train_on
        self.chat = chat
        self.rows: list[TokenRow] = []
        self.counts: Counter[str] = Counter()
        self.stop_ids: list[int] = stop_token_ids(tokenizer)
        """At which generation must stop: eos, and the template's end of turn where it is another."""
        self._shape: TurnShape | None = None
        self._replies: ReplyFinder | None = None
        self._controls: re.Pattern[str] | None = None

    def add(self, chunk: Sequence[tuple[Example | DataError, str]], *, skip_invalid: bool) -> None:
        self.counts["rows"] += len(chunk)
        self.counts["skipped_invalid"] += sum(isinstance(example, DataError) for example, _ in chunk)
        conversations = [(example, place) for example, place in chunk if isinstance(example, Conversation)]
        documents = [(example, place) for example, place in chunk if isinstance(example, Document)]
        if documents:
            self._add_documents(documents)
        if conversations:
            self._add_conversations(conversations, skip_invalid)

    def finish(self) -> dict[str, int]:
        assert self.counts.keys() <= set(COUNTS)
        return {name: self.counts[name] for name in COUNTS}

    def _keep(self, input_ids: np.ndarray, loss_mask: np.ndarray, place: str) -> None:
        supervised = int(np.count_nonzero(loss_mask))
        if not supervised:
            self.counts["dropped_without_target"] += 1
            return
        self.rows.append(TokenRow(input_ids, loss_mask, place))
        self.counts["kept"] += 1
        self.counts["tokens"] += len(input_ids)
        self.counts["supervised_tokens"] += supervised

    def _is_overlong(self, length: int, place: str) -> bool:
        """Whether a row is longer than allowed. Raises DataError where that is an error."""
        if self.max_seq_length is None or length <= self.max_seq_length:
            return False
        if self.overlong == "error":
            raise DataError(
                f"the row has {length} tokens, more than max_seq_length {self.max_seq_length}",
                where=place,
                fix="raise max_seq_length, or say `overlong: drop` or `overlong: truncate`",
            )
        return True

    def _add_documents(self, documents: list[tuple[Document, str]]) -> None:
        eos = self.tokenizer.eos_token_id
        if eos is None:
            raise DataError(
                "the tokenizer has no eos token to end a document with",
                where=self.tokenizer.name_or_path or None,
                fix="set `eos_token` in tokenizer_config.json",
            )
        bos = self.tokenizer.bos_token_id if _prepends_bos(self.tokenizer) else None
        texts = [document.text for document, _ in documents]
        batch = self.tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)
        for ids, (_, place) in zip(batch["input_ids"], documents, strict=True):
            head = [bos] if bos is not None and ids[:1] != [bos] else []
            tail = [eos] if ids[-1:] != [eos] else []
            input_ids = np.array([*head, *ids, *tail], dtype=np.int32)
            pieces = [input_ids]
            if self._is_overlong(len(input_ids), place):
                assert self.max_seq_length is not None
                if self.overlong == "drop":
                    self.counts["dropped_overlong"] += 1
                    continue
                if self.overlong == "truncate":
                    pieces = [input_ids[: self.max_seq_length]]
                    self.counts["truncated"] += 1
                else:
                    pieces = split_document(input_ids, self.max_seq_length)
                    self.counts["split"] += 1
            for piece in pieces:
                self._keep(piece, _all_but_first(len(piece)), place)

    def _add_conversations(self, conversations: list[tuple[Conversation, str]], skip_invalid: bool) -> None:
        if self.train_on == "assistant" and self._shape is None:
            self._shape = read_turn_shape(self.tokenizer)
            self._replies = ReplyFinder(self.tokenizer, self._shape)
        try:
            rendered = list(self._render(conversations))
        except DataError:
            if not skip_invalid:
                raise
            if len(conversations) == 1:
                self.counts["skipped_invalid"] += 1
                return
            for one in conversations:
                self._add_conversations([one], skip_invalid)
            return
        self._count_content(conversations)
        for (conversation, place), (encoded, mask, text) in zip(conversations, rendered, strict=True):
            self._add_rendered(conversation, place, encoded, mask, text)

    def _render(self, conversations: list[tuple[Conversation, str]]) -> Iterator[tuple[Encoded, np.ndarray, str]]:
        """(tokens, loss mask, text) of each conversation."""
        chats, places = [chat for chat, _ in conversations], [place for _, place in conversations]
        texts = render(self.tokenizer, [chat.messages for chat in chats], places=places)
        if self._shape is None or self._replies is None:
            for text, encoded in zip(texts, encode_texts(self.tokenizer, texts), strict=True):
                yield encoded, _all_but_first(len(encoded.input_ids)), text
            return
        spans = self._replies.find(chats, texts, places)
        encodings = encode_texts(self.tokenizer, texts)
        for text, row_spans, encoded, place in zip(texts, spans, encodings, places, strict=True):
            mask = np.zeros(len(encoded.input_ids), dtype=np.bool_)
            for start, end in row_spans:
                tokens = encoded.tokens_of(start, end)
                if tokens.start == tokens.stop or encoded.input_ids[tokens.stop - 1] != self._shape.stop_id:
                    raise DataError(
                        f"a reply doesn't end in the stop token {self._shape.stop_text.strip()!r} once tokenized",
                        where=place,
                        fix="make it a special token of the tokenizer",
                    )
                mask[tokens] = True
            mask[:1] = False
            yield encoded, mask, text

    def _add_rendered(
        self, conversation: Conversation, place: str, encoded: Encoded, mask: np.ndarray, text: str
    ) -> None:
        input_ids = encoded.input_ids
        if self._is_overlong(len(input_ids), place):
            assert self.max_seq_length is not None
            if self.overlong == "split":
                raise DataError(
                    f"a conversation of {len(input_ids)} tokens can't be split",
                    where=place,
                    fix="say `overlong: drop` or `overlong: truncate`, or raise max_seq_length",
                )
            cut = None
            if self.overlong == "truncate":
                header = _header_start(conversation, encoded, mask, text)
                cut = cut_conversation(input_ids, mask, header, self.max_seq_length)
            if cut is None:
                self.counts["dropped_overlong"] += 1
                return
            input_ids, mask = cut
            self.counts["truncated"] += 1
        self._keep(input_ids, mask, place)

    def _count_content(self, conversations: list[tuple[Conversation, str]]) -> None:
        if self._controls is None:
            added = self.tokenizer.added_tokens_decoder.values()
            special = {token.content for token in added if token.special and token.content.strip()}
            longest_first = sorted(special | set(self.tokenizer.all_special_tokens), key=len, reverse=True)
            self._controls = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        found, empty = 0, 0
        for conversation, _ in conversations:
            for message in conversation.messages:
                found += len(self._controls.findall(message["content"]))
            empty += sum(not conversation.messages[turn]["content"].strip() for turn in conversation.trained)
        self.counts["control_tokens_in_content"] += found
        self.counts["empty_replies"] += empty


def _all_but_first(length: int) -> np.ndarray:
    mask = np.ones(length, dtype=np.bool_)
    mask[:1] = False
    return mask


def _prepends_bos(tokenizer: Any) -> bool:
    return tokenizer.bos_token_id is not None and tokenizer("a").input_ids[:1] == [tokenizer.bos_token_id]


def _header_start(conversation: Conversation, encoded: Encoded, mask: np.ndarray, text: str) -> int | None:
    """The first token after the content that stands before the first reply: there begin its end of turn and the reply's
    header, which a cut must keep. None where that content can't be found in the text."""
    first_reply = int(np.argmax(mask))
    turn = conversation.trained[0] if conversation.trained else 0
    content = conversation.messages[turn - 1]["content"].strip() if turn else ""
    reply_start = int(encoded.starts[first_reply])
    at = text.rfind(content, 0, reply_start) if content else -1
    if at < 0:
        return None
    return min(int(np.searchsorted(encoded.starts, at + len(content), side="left")), first_reply)
