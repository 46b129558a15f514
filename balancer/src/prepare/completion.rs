//! `/v1/completions`: text or token ids, one prompt or several; no media.

use std::borrow::Cow;

use fovea_openai::{CompletionRequest, Prompt};

use super::view::of_tokens;
use super::{Prepared, Preparer, Target, ViewKind};

impl Preparer {
    pub(super) fn completion(&self, request: &CompletionRequest<'_>, target: Target<'_>) -> Prepared {
        let common = &request.common;
        let unknown = |reason| Prepared::unknown(common, reason).with_edits(Vec::new(), common.cuts.clone());
        if request.prompt_embeds {
            return unknown("embeddings");
        }
        if common.truncate_prompt_tokens {
            return unknown("truncate_prompt_tokens");
        }
        if let Some(reason) = target.blurred(common) {
            return unknown(reason);
        }
        let Some(prompts) =
            request.prompt.as_ref().and_then(|prompt| self.encode_all(prompt, common.add_special_tokens))
        else {
            return unknown("tokenizer");
        };
        let root = target.root(common);
        let mut hashes = Vec::new();
        let views: Vec<_> = prompts.iter().map(|tokens| of_tokens(tokens)).collect();
        let mut views = views.iter();
        let Some(first) = views.next() else { return unknown("no prompt") };
        target.hash(first, root, &mut hashes);
        let mut prepared = unknown("").with_view(ViewKind::Exact, first, hashes, root);
        target.speak(&mut prepared.preamble, first.clone());
        // vLLM 0.32: `echo` with `logprobs` makes prompt logprobs of them.
        prepared.reads_cache = !(common.prompt_logprobs || common.echo && common.logprobs);
        for view in views {
            target.hash(view, root, &mut prepared.hashes);
            prepared.prompt_tokens = prepared.prompt_tokens.saturating_add(view.len());
        }
        if prompts.len() > 1 {
            prepared.prompts = prompts.iter().map(|tokens| u32::try_from(tokens.len()).unwrap_or(u32::MAX)).collect();
        }
        prepared
    }

    fn encode_all<'t>(&self, prompt: &'t Prompt<'_>, special: Option<bool>) -> Option<Vec<Cow<'t, [u32]>>> {
        // vLLM adds the tokenizer's own special tokens to completions unless told not to.
        let encode = |text: &str| {
            let mut tokens = Vec::new();
            self.prompt.encode(text, special.unwrap_or(true), &mut tokens).ok()?;
            Some(Cow::Owned(tokens))
        };
        match prompt {
            Prompt::Text(text) => Some(vec![encode(text)?]),
            Prompt::Texts(texts) => texts.iter().map(|text| encode(text)).collect(),
            Prompt::Tokens(tokens) => Some(vec![Cow::Borrowed(tokens)]),
            Prompt::TokenLists(lists) => Some(lists.iter().map(|tokens| Cow::Borrowed(tokens.as_slice())).collect()),
        }
    }
}
