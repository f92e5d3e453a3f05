"""All tables and figures, in the order in which they are run."""

from bench.paper import fl_glm
from bench.paper.artefact import Artefact

ARTEFACTS: tuple[Artefact, ...] = fl_glm.ARTEFACTS
