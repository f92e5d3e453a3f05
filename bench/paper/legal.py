"""FedJudge's clients, methods and metrics, and the questions of figures 4 and 5."""

from collections.abc import Mapping

from bench.paper.cells import LegalMethod

# The paper's clients 1, 2 and 3.
CLIENTS = ("court", "consultation", "reasoning")
CENTER_CLIENTS: Mapping[str, str] = {
    f"center-client{number}": client for number, client in enumerate(CLIENTS, start=1)
}
# Names of a method's models in the paper's tables: the global one, then those of the clients.
MODELS: Mapping[LegalMethod, tuple[str, ...]] = {
    "bare": ("Bare model",),
    "center": ("Center",),
    "center-client1": ("Center-Client1",),
    "center-client2": ("Center-Client2",),
    "center-client3": ("Center-Client3",),
    "fedjudge-base": ("FedJudge-Base", "Base-Client1", "Base-Client2", "Base-Client3"),
    "fedjudge-cl": ("FedJudge-CL", "CL-Client1", "CL-Client2", "CL-Client3"),
}
# What figures 4 and 5 ask. The questions are our own: it is not clear that rows may be passed on.
ASKED: Mapping[str, str] = {
    "consultation": "假设你是一名律师，请回答以下向你咨询的问题：\n"
    "租房合同到期后，房东以墙面有钉孔为由不退还押金，我应该怎么办？",
    "reasoning": "请给出详细的推理过程之后再给出答案。\n"
    "甲把自行车借给乙使用一周。第三天，乙谎称车是自己的，以市价卖给不知情的丙，并交付给了丙。"
    "丙是否取得自行车的所有权？",
}
# Kinds of a client's rows, as they are counted: trained on, answered, measured by their loss.
COUNTED = ("training rows", "prompts", "held-out rows")
METRICS: Mapping[str, str] = {
    "R-1": "rouge1",
    "R-2": "rouge2",
    "R-L": "rougeL",
    "B-4": "bleu4",
    "B-N": "bleu_n",
    "Bert-S": "bertscore",
}
