"""All tables and figures, in the order in which they are run."""

from bench.paper import fedjudge, fl_glm
from bench.paper.artefact import Artefact

ARTEFACTS: tuple[Artefact, ...] = (*fedjudge.ARTEFACTS, *fl_glm.ARTEFACTS)
