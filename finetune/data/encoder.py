"""Examples to token rows: render, tokenize, mask, and cut or drop what is too long."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from finetune.data.conversations import ConversationEncoder, EncodedChat, HistoryError, all_but_first
from finetune.data.dataset import COUNTS, TokenRow
from finetune.data.formats import Completion, Conversation, Document, Example, Preference, TokenIds
from finetune.data.options import DEFAULT_CHAT_OPTIONS, ChatOptions, Overlong, TrainOn
from finetune.data.overlong import cut_completion, cut_conversation, split_document
from finetune.data.plain import TextEncoder, token_ids_row
from finetune.data.template import stop_token_ids
from finetune.errors import DataError


class _Item(NamedTuple):
    position: int
    example: Any
    place: str


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
        self._chats = ConversationEncoder(tokenizer, train_on, chat)
        self._texts = TextEncoder(tokenizer, self._chats.controls, allow_control_tokens=chat.allow_control_tokens)
        self._vocab_size = 0
        self._made: list[tuple[int, TokenRow]] = []

    @cached_property
    def stop_ids(self) -> list[int]:
        """At which generation must stop: eos, and the template's end of turn where it is another."""
        return stop_token_ids(self.tokenizer)

    def add(self, chunk: Sequence[tuple[Example | DataError, str]], *, skip_invalid: bool) -> None:
        """Add the rows of (example, place), in order. An error in the place of an example is a row that was skipped.

        Raises DataError for an example that can't be used, or, with ``skip_invalid``, counts it; for a row that is too
        long where that is an error; and for a preference, which this doesn't train on.
        """
        self.counts["rows"] += len(chunk)
        alike: dict[type, list[_Item]] = {}
        for index, (example, place) in enumerate(chunk):
            alike.setdefault(type(example), []).append(_Item(index, example, place))
        # What is of one kind is tokenized in one call, and its rows go back to their places.
        for items in alike.values():
            self._add_alike(items, skip_invalid)
        self.rows += [row for _, row in sorted(self._made, key=lambda made: made[0])]
        self._made.clear()

    def finish(self) -> dict[str, int]:
        assert self.counts.keys() <= set(COUNTS)
        return {name: self.counts[name] for name in COUNTS}

    def _add_alike(self, items: list[_Item], skip_invalid: bool) -> None:
        example = items[0].example
        if isinstance(example, DataError):
            self.counts["skipped_invalid"] += len(items)
        elif isinstance(example, Document):
            self._add_documents(items)
        elif isinstance(example, Conversation):
            self._add_conversations(items, skip_invalid)
        elif isinstance(example, Completion):
            self._add_completions(items)
        elif isinstance(example, TokenIds):
            self._add_token_ids(items, skip_invalid)
        else:
            assert isinstance(example, Preference)
            raise DataError(
                "the row is a preference (chosen and rejected), which this stage doesn't train on",
                where=items[0].place,
                fix="say `use: chosen` in the recipe to learn the chosen answers",
            )

    def _keep(self, item: _Item, input_ids: np.ndarray, loss_mask: np.ndarray) -> str | None:
        """The cause where it isn't kept."""
        supervised = int(np.count_nonzero(loss_mask))
        if not supervised:
            return "dropped_without_target"
        self._made.append((item.position, TokenRow(input_ids, loss_mask, item.place)))
        self.counts["kept"] += 1
        self.counts["tokens"] += len(input_ids)
        self.counts["supervised_tokens"] += supervised
        return None

    def _count_dropped(self, causes: Sequence[str | None]) -> None:
        """``causes``: of each piece of one row, None where it was kept. A row is dropped where no piece was kept."""
        dropped = [cause for cause in causes if cause is not None]
        if len(dropped) < len(causes):
            self.counts["dropped_pieces"] += len(dropped)
        elif dropped:
            self.counts[dropped[0]] += 1

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

    def _no_split(self, what: str, length: int, place: str) -> DataError:
        return DataError(
            f"a {what} of {length} tokens can't be split",
            where=place,
            fix="say `overlong: drop` or `overlong: truncate`, or raise max_seq_length",
        )

    def _add_documents(self, items: list[_Item]) -> None:
        encoded = self._texts.documents([item.example for item in items])
        for item, input_ids in zip(items, encoded, strict=True):
            self._count_controls(self._texts.count(item.example.text), is_text=True)
            self._add_whole(item, input_ids, all_but_first(len(input_ids)))

    def _add_token_ids(self, items: list[_Item], skip_invalid: bool) -> None:
        # A vocabulary may have holes, and the embedding is padded at times: what counts is what the tokenizer knows.
        self._vocab_size = self._vocab_size or max(self.tokenizer.get_vocab().values()) + 1
        for item in items:
            try:
                input_ids, mask = token_ids_row(item.example, item.place, self._vocab_size)
            except DataError:
                if not skip_invalid:
                    raise
                self.counts["skipped_invalid"] += 1
            else:
                self._add_whole(item, input_ids, mask)

    def _add_whole(self, item: _Item, input_ids: np.ndarray, mask: np.ndarray) -> None:
        """A row that may be cut anywhere."""
        if not self._is_overlong(len(input_ids), item.place):
            self._count_dropped([self._keep(item, input_ids, mask)])
        elif self.overlong == "drop":
            self.counts["dropped_overlong"] += 1
        elif self.overlong == "truncate":
            self.counts["truncated"] += 1
            self._count_dropped([self._keep(item, input_ids[: self.max_seq_length], mask[: self.max_seq_length])])
        else:
            assert self.max_seq_length is not None
            self.counts["split"] += 1
            pieces, masks = (split_document(whole, self.max_seq_length) for whole in (input_ids, mask))
            self._count_dropped(
                [
                    self._keep(item, piece, piece_mask & all_but_first(len(piece)))
                    for piece, piece_mask in zip(pieces, masks, strict=True)
                ]
            )

    def _add_completions(self, items: list[_Item]) -> None:
        if self.train_on == "all":
            texts = [Document(item.example.prompt + item.example.completion) for item in items]
            self._add_documents([item._replace(example=text) for item, text in zip(items, texts, strict=True)])
            return
        encoded = self._texts.completions([(item.example, item.place) for item in items])
        for item, (input_ids, mask) in zip(items, encoded, strict=True):
            found = self._texts.count(item.example.prompt) + self._texts.count(item.example.completion)
            self._count_controls(found, is_text=True)
            self.counts["empty_replies"] += not item.example.completion.strip()
            if self._is_overlong(len(input_ids), item.place):
                assert self.max_seq_length is not None
                if self.overlong == "split":
                    raise self._no_split("completion", len(input_ids), item.place)
                if self.overlong == "drop":
                    self.counts["dropped_overlong"] += 1
                    continue
                input_ids, mask = cut_completion(input_ids, mask, self._texts.head_length, self.max_seq_length)
                self.counts["truncated"] += 1
            self._count_dropped([self._keep(item, input_ids, mask)])

    def _add_conversations(self, items: list[_Item], skip_invalid: bool) -> None:
        try:
            encoded = self._chats.encode([(item.example, item.place) for item in items])
        except HistoryError as error:
            # No fault of the row: it isn't skipped.
            raise DataError(error.what, where=error.where, fix=error.fix) from None
        except DataError:
            if not skip_invalid:
                raise
            if len(items) == 1:
                self.counts["skipped_invalid"] += 1
                return
            middle = len(items) // 2
            self._add_conversations(items[:middle], skip_invalid)
            self._add_conversations(items[middle:], skip_invalid)
            return
        for item, found in zip(items, encoded, strict=True):
            self._count_controls(found.num_controls, is_text=False)
            self.counts["empty_replies"] += sum([_is_empty(item.example.messages[t]) for t in item.example.trained])
            if not found.rows:
                self.counts["dropped_without_target"] += 1
            elif found.rows[0].policy is not None:
                self.counts[found.rows[0].policy] += 1
            truncated = self.counts["truncated"]
            self._count_dropped([self._add_chat(item, row) for row in found.rows])
            self.counts["truncated"] = min(self.counts["truncated"], truncated + 1)  # rows, not their turns

    def _add_chat(self, item: _Item, row: EncodedChat) -> str | None:
        """The cause where it isn't kept."""
        input_ids, mask = row.encoded.input_ids, row.loss_mask
        if self._is_overlong(len(input_ids), item.place):
            assert self.max_seq_length is not None
            if self.overlong == "split":
                raise self._no_split("conversation", len(input_ids), item.place)
            cut = None
            if self.overlong == "truncate":
                cut = cut_conversation(input_ids, mask, _asked(row), self.max_seq_length)
            if cut is None:
                return "dropped_overlong"
            input_ids, mask = cut
            self.counts["truncated"] += 1
        return self._keep(item, input_ids, mask)

    def _count_controls(self, found: int, *, is_text: bool) -> None:
        self.counts["control_tokens_in_content"] += found
        if is_text and found and not self.chat.allow_control_tokens:
            self.counts["texts_with_control_tokens"] += 1


def _is_empty(message: dict[str, Any]) -> bool:
    return not (message["content"].strip() or message.get("tool_calls") or message.get("reasoning_content"))


def _asked(row: EncodedChat) -> tuple[int, int] | None:
    """The first token of the content that stands before the first reply, and the first one after it: there begin its
    end of turn and the reply's header, which a cut must keep. None where that content can't be found in the text."""
    conversation, encoded = row.conversation, row.encoded
    first_reply = int(np.argmax(row.loss_mask))
    turn = conversation.trained[0] if conversation.trained else 0
    content = conversation.messages[turn - 1]["content"].strip() if turn else ""
    reply_start = int(encoded.starts[first_reply])
    at = row.text.rfind(content, 0, reply_start) if content else -1
    if at < 0:
        return None
    end = int(np.searchsorted(encoded.starts, at + len(content), side="left"))
    return encoded.first_token(at), min(end, first_reply)
