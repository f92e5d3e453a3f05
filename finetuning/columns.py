"""Names of the columns of rows, as on the Hugging Face Hub, in TRL, axolotl and LLaMA-Factory."""

CHAT_COLUMNS = ("messages", "conversations")
QUESTION_COLUMNS = ("instruction", "prompt", "question", "query", "input")
MORE_COLUMNS = ("input", "context")  # texts that follow the question
ANSWER_COLUMNS = ("output", "completion", "response", "answer")
SYSTEM_COLUMNS = ("system", "system_prompt")
# Names that ``data.columns`` can assign to columns.
COLUMNS = (*CHAT_COLUMNS, *QUESTION_COLUMNS, "context", *ANSWER_COLUMNS, *SYSTEM_COLUMNS, "history")
