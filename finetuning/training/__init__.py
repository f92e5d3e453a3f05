"""The training loop, its optimizer, and the penalties of FedJudge-CL and FedProx."""
