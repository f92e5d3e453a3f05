"""Answer a question with an adapter that a run has exported, using only transformers and peft.

    python examples/use_adapter.py runs/<run>/adapters/global "Is the contract void?"

The adapter's folder names its base model's Hugging Face id. If the base model was a folder, add
``--model FOLDER``.
"""

import argparse

import torch
from peft import PeftConfig, PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    """Load the model, tokenize the question as in training, and print the answer."""
    parser = argparse.ArgumentParser(description="Answer a question with an exported adapter.")
    parser.add_argument("adapter", help="folder with adapter_config.json")
    parser.add_argument("question")
    parser.add_argument("--model", help="folder or Hugging Face id of the base model")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    arguments = parser.parse_args()

    config = PeftConfig.from_pretrained(arguments.adapter)
    base = arguments.model or config.base_model_name_or_path
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), arguments.adapter)
    tokenizer = AutoTokenizer.from_pretrained(base)
    if tokenizer.chat_template:
        inputs = tokenizer.apply_chat_template(
            [{"role": "user", "content": arguments.question}],
            add_generation_prompt=True,
            enable_thinking=False,
            return_dict=True,
            return_tensors="pt",
        )
    else:
        # Without a chat template, Chambers formats rows in FedJudge's plain form.
        prompt = f"Instruction Input:\n{arguments.question}\nInstruction Output:\n"
        inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    with torch.inference_mode():
        output = model.generate(**inputs, max_new_tokens=arguments.max_new_tokens, do_sample=False)
    answer = output[0, inputs["input_ids"].shape[1] :]
    print(tokenizer.decode(answer, skip_special_tokens=True).strip())


if __name__ == "__main__":
    main()
