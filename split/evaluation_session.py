"""One client's evaluation of models at the block server: forward passes alone."""

from collections.abc import Mapping

import torch

from finetuning.settings import AdapterSettings
from split.branch import State, load_state
from split.compute import ComputeThread, Urgency
from split.frames import Frame, Kind
from split.lane import Lane
from split.parts import Part
from split.session import ProtocolError, Session, hidden_of

# The body's adapters by the name of the model; None is the body without any.
Models = Mapping[str, State | None]


class EvaluationSession(Session):
    """Serves one client's evaluation; each frame JOIN chooses a model.

    Args:
        lane: to the client; the handshake is over.
        models: what may be chosen.
        body: the frozen blocks.
        adapter: rank, scale and targets.
        compute: runs its jobs.
        window: micro-batches that may be under way at once.
        frame_timeout: seconds to wait for the client's next frame.

    """

    def __init__(
        self,
        lane: Lane,
        models: Models,
        body: Part,
        adapter: AdapterSettings,
        compute: ComputeThread,
        window: int,
        frame_timeout: float,
    ) -> None:
        super().__init__(lane, "evaluate", compute, frame_timeout)
        self._models = models
        self._body = body
        self._adapter = adapter
        self._window = window
        self._name: str | None = None
        self._received = self._computed = 0  # micro-batches
        self._choosing = False

    def serve(self) -> None:
        """Answer frames until the client has evaluated all it wants.

        Raises:
            LaneError: the lane broke, or the client was silent for too long.
            ProtocolError: the client sent what it may not send now.

        """
        try:
            chosen = False
            while (frame := self.receive()).kind is not Kind.END:
                if frame.kind is Kind.JOIN:
                    self._choose(frame)
                    chosen = True
                elif frame.kind is Kind.HIDDEN and chosen:
                    self._take_hidden(frame)
                else:
                    raise ProtocolError(f"a frame {frame.kind.name} came in an evaluation")
            self.lane.send(Kind.END)
        finally:
            self.compute.withdraw(self)
            self.compute.call(self._detach)

    def _choose(self, frame: Frame) -> None:
        model = frame.fields.get("model")
        if not isinstance(model, str) or model not in self._models:
            raise ProtocolError(
                f"the model {model!r} isn't among those to evaluate: {', '.join(self._models)}"
            )
        if self._choosing or self._received > self._computed:
            raise ProtocolError("another model was chosen before the answers to the last one")
        state = self._models[model]
        self._choosing = True

        def choose() -> None:
            self._detach()
            if state is not None:
                self._name = f"evaluation {id(self)}"
                self._body.attach(self._adapter, self._name)
                load_state(self._body.trainable(self._name), state)
            self._choosing = False
            self.lane.send(Kind.WELCOME, fields={"credits": self._window})

        self.put(Urgency.STEP, choose)

    def _take_hidden(self, frame: Frame) -> None:
        hidden, padding = hidden_of(frame)
        self._received += 1
        if self._received - self._computed > self._window:
            raise ProtocolError(f"more than {self._window} micro-batches are under way")

        @torch.no_grad()
        def forward() -> None:
            self._body.use(self._name)
            self._body.train(False)
            output = self._body(hidden, padding)
            self.account.tokens += hidden.shape[0] * hidden.shape[1]
            self._computed += 1
            self.lane.send(Kind.HIDDEN, frame.step, frame.micro_batch, {"hidden": output})

        self.put(Urgency.FORWARD, forward)

    def _detach(self) -> None:
        if self._name is not None:
            self._body.remove(self._name)
            self._name = None
