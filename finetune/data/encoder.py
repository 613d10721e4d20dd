"""Examples to token rows: render, tokenize, mask, and cut or drop what is too long."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from finetune.data.conversations import ConversationEncoder, EncodedChat, HistoryError, all_but_first
from finetune.data.dataset import COUNTS, TokenRow
from finetune.data.formats import Completion, Conversation, Document, Example, Preference, TokenIds
from finetune.data.options import DEFAULT_CHAT_OPTIONS, ChatOptions, Overlong, TrainOn
from finetune.data.overlong import cut_completion, cut_conversation, split_document
from finetune.data.plain import TextEncoder, token_ids_row
from finetune.data.template import stop_token_ids
from finetune.errors import DataError

Pairs = list[tuple[Any, str]]


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
        self._chats = ConversationEncoder(tokenizer, train_on, chat)
        self._texts = TextEncoder(tokenizer, self._chats.controls, allow_control_tokens=chat.allow_control_tokens)
        self._vocab_size = 0

    def add(self, chunk: Sequence[tuple[Example | DataError, str]], *, skip_invalid: bool) -> None:
        """Add the rows of (example, place), in order. An error in the place of an example is a row that was skipped.

        Raises DataError for an example that can't be used, or, with ``skip_invalid``, counts it; for a row that is too
        long where that is an error; and for a preference, which this doesn't train on.
        """
        self.counts["rows"] += len(chunk)
        # What follows one another and is of one kind is tokenized in one call.
        start = 0
        for end in range(1, len(chunk) + 1):
            if end == len(chunk) or type(chunk[end][0]) is not type(chunk[start][0]):
                self._add_alike(list(chunk[start:end]), skip_invalid)
                start = end

    def finish(self) -> dict[str, int]:
        assert self.counts.keys() <= set(COUNTS)
        return {name: self.counts[name] for name in COUNTS}

    def _add_alike(self, pairs: Pairs, skip_invalid: bool) -> None:
        example, place = pairs[0]
        if isinstance(example, DataError):
            self.counts["skipped_invalid"] += len(pairs)
        elif isinstance(example, Document):
            self._add_documents(pairs)
        elif isinstance(example, Conversation):
            self._add_conversations(pairs, skip_invalid)
        elif isinstance(example, Completion):
            self._add_completions(pairs)
        elif isinstance(example, TokenIds):
            self._add_token_ids(pairs, skip_invalid)
        else:
            assert isinstance(example, Preference)
            raise DataError(
                "the row is a preference (chosen and rejected), which this stage doesn't train on",
                where=place,
                fix="give rows of messages, or of prompt and completion",
            )

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

    def _no_split(self, what: str, length: int, place: str) -> DataError:
        return DataError(
            f"a {what} of {length} tokens can't be split",
            where=place,
            fix="say `overlong: drop` or `overlong: truncate`, or raise max_seq_length",
        )

    def _add_documents(self, documents: Pairs) -> None:
        encoded = self._texts.documents([document for document, _ in documents])
        for input_ids, (document, place) in zip(encoded, documents, strict=True):
            self._count_controls(self._texts.count(document.text), is_text=True)
            self._add_whole(input_ids, all_but_first(len(input_ids)), place)

    def _add_token_ids(self, rows: Pairs, skip_invalid: bool) -> None:
        # A vocabulary may have holes, and the embedding is padded at times: what counts is what the tokenizer knows.
        self._vocab_size = self._vocab_size or max(self.tokenizer.get_vocab().values()) + 1
        for example, place in rows:
            try:
                input_ids, mask = token_ids_row(example, place, self._vocab_size)
            except DataError:
                if not skip_invalid:
                    raise
                self.counts["skipped_invalid"] += 1
            else:
                self._add_whole(input_ids, mask, place)

    def _add_whole(self, input_ids: np.ndarray, mask: np.ndarray, place: str) -> None:
        """A row that may be cut anywhere."""
        if not self._is_overlong(len(input_ids), place):
            self._keep(input_ids, mask, place)
        elif self.overlong == "drop":
            self.counts["dropped_overlong"] += 1
        elif self.overlong == "truncate":
            self.counts["truncated"] += 1
            self._keep(input_ids[: self.max_seq_length], mask[: self.max_seq_length], place)
        else:
            assert self.max_seq_length is not None
            self.counts["split"] += 1
            pieces, masks = (split_document(whole, self.max_seq_length) for whole in (input_ids, mask))
            for piece, piece_mask in zip(pieces, masks, strict=True):
                self._keep(piece, piece_mask & all_but_first(len(piece)), place)

    def _add_completions(self, completions: Pairs) -> None:
        if self.train_on == "all":
            joined = [(Document(one.prompt + one.completion), place) for one, place in completions]
            self._add_documents(joined)
            return
        for (input_ids, mask), (example, place) in zip(self._texts.completions(completions), completions, strict=True):
            found = self._texts.count(example.prompt) + self._texts.count(example.completion)
            self._count_controls(found, is_text=True)
            self.counts["empty_replies"] += not example.completion.strip()
            if self._is_overlong(len(input_ids), place):
                assert self.max_seq_length is not None
                if self.overlong == "split":
                    raise self._no_split("completion", len(input_ids), place)
                if self.overlong == "drop":
                    self.counts["dropped_overlong"] += 1
                    continue
                input_ids, mask = cut_completion(input_ids, mask, self._texts.head_length, self.max_seq_length)
                self.counts["truncated"] += 1
            self._keep(input_ids, mask, place)

    def _add_conversations(self, conversations: Pairs, skip_invalid: bool) -> None:
        try:
            rows = self._chats.encode(conversations)
        except HistoryError as error:
            # No fault of the row: it isn't skipped.
            raise DataError(error.what, where=error.where, fix=error.fix) from None
        except DataError:
            if not skip_invalid:
                raise
            if len(conversations) == 1:
                self.counts["skipped_invalid"] += 1
                return
            middle = len(conversations) // 2
            self._add_conversations(conversations[:middle], skip_invalid)
            self._add_conversations(conversations[middle:], skip_invalid)
            return
        for (conversation, _), found in zip(conversations, rows, strict=True):
            self._count_controls(self._chats.controls.count_in(conversation), is_text=False)
            self.counts["empty_replies"] += sum(_is_empty(conversation.messages[t]) for t in conversation.trained)
            if not found:
                self.counts["dropped_without_target"] += 1
            elif found[0].policy is not None:
                self.counts[found[0].policy] += 1
            for row in found:
                self._add_encoded(row)

    def _add_encoded(self, row: EncodedChat) -> None:
        input_ids, mask, place = row.encoded.input_ids, row.loss_mask, row.place
        if self._is_overlong(len(input_ids), place):
            assert self.max_seq_length is not None
            if self.overlong == "split":
                raise self._no_split("conversation", len(input_ids), place)
            cut = None
            if self.overlong == "truncate":
                cut = cut_conversation(input_ids, mask, _header_start(row), self.max_seq_length)
            if cut is None:
                self.counts["dropped_overlong"] += 1
                return
            input_ids, mask = cut
            self.counts["truncated"] += 1
        self._keep(input_ids, mask, place)

    def _count_controls(self, found: int, *, is_text: bool) -> None:
        self.counts["control_tokens_in_content"] += found
        if is_text and found and not self.chat.allow_control_tokens:
            self.counts["texts_with_control_tokens"] += 1


def _is_empty(message: dict[str, Any]) -> bool:
    return not (message["content"].strip() or message.get("tool_calls") or message.get("reasoning_content"))


def _header_start(row: EncodedChat) -> int | None:
    """The first token after the content that stands before the first reply: there begin its end of turn and the reply's
    header, which a cut must keep. None where that content can't be found in the text."""
    conversation, encoded = row.conversation, row.encoded
    first_reply = int(np.argmax(row.loss_mask))
    turn = conversation.trained[0] if conversation.trained else 0
    content = conversation.messages[turn - 1]["content"].strip() if turn else ""
    reply_start = int(encoded.starts[first_reply])
    at = row.text.rfind(content, 0, reply_start) if content else -1
    if at < 0:
        return None
    return min(int(np.searchsorted(encoded.starts, at + len(content), side="left")), first_reply)
