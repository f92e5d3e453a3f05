"""Names of the columns of rows, as on the Hugging Face Hub, in TRL, axolotl and LLaMA-Factory."""

CHATS = ("messages", "conversations")
QUESTIONS = ("instruction", "prompt", "question", "query", "input")
MORE = ("input", "context")  # texts that follow the question
ANSWERS = ("output", "completion", "response", "answer")
SYSTEMS = ("system", "system_prompt")
# Names that ``data.columns`` can assign to columns.
COLUMNS = (*CHATS, *QUESTIONS, "context", *ANSWERS, *SYSTEMS, "history")
