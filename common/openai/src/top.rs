//! What chat and completion bodies have in common.

use std::borrow::Cow;
use std::ops::Range;

use serde_json::{Map, Value};

use crate::cut::{CutPolicy, cut_members};
use crate::json::{Cursor, Kind, Member, Result};

/// Whether the answer comes as a stream of events.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Streaming {
    pub on: bool,
    /// `stream_options.include_usage`: the last event tells the token counts.
    pub include_usage: bool,
}

/// Facts of the whole request. A value of the wrong type in a field that does not change the prompt counts as absent: the engine judges it.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Common<'a> {
    pub model: Option<Cow<'a, str>>,
    pub stream: Streaming,
    /// Answers asked for; 1 when absent.
    pub n: Option<u64>,
    /// `max_completion_tokens`, else `max_tokens`.
    pub max_tokens: Option<u64>,
    pub priority: Option<i64>,
    pub cache_salt: Option<Cow<'a, str>>,
    /// Where its value stands in the body, null too.
    pub cache_salt_at: Option<Range<usize>>,
    pub user: Option<Cow<'a, str>>,
    pub session_id: Option<Cow<'a, str>>,
    pub prompt_cache_key: Option<Cow<'a, str>>,
    /// Enter image identities and token counts. Empty when absent; keys in the client's order.
    pub mm_processor_kwargs: Map<String, Value>,
    /// By modality; enter image identities. Empty when absent; keys in the client's order.
    pub media_io_kwargs: Map<String, Value>,
    /// Whether the engine adds the tokenizer's own special tokens; its default depends on the end point.
    pub add_special_tokens: Option<bool>,
    /// Cuts the prompt to its last tokens, so nothing can be predicted from its front.
    pub truncate_prompt_tokens: bool,
    /// `max_dynamic_patch` and `min_dynamic_patch` (SGLang 0.5.23): they change how images are cut into tiles. Empty when absent.
    pub patch_options: Map<String, Value>,
    /// A field, given and not null, that sets the request's blocks apart by other means than its salt and model name: `extra_key` or
    /// `lora_path` (SGLang).
    pub namespace: Option<&'static str>,
    /// A field, given and not null, that holds the prompt's token ids in place of messages: `input_ids` (SGLang) or `prompt_token_ids`
    /// (TensorRT-LLM).
    pub prompt_ids: Option<&'static str>,
    /// `prompt_logprobs`, `echo` and `logprobs` ask for something.
    pub prompt_logprobs: bool,
    pub echo: bool,
    pub logprobs: bool,
    /// Where a member, comma included, can be put into the body: in front of its first one. 0 = nowhere.
    pub insert_at: usize,
    /// Ranges of the body that must not reach an engine ([`CutPolicy`], except uuids, which stand with their parts), in order.
    pub cuts: Vec<Range<usize>>,
}

impl<'a> Common<'a> {
    /// Reads the member if it is one of ours.
    pub(crate) fn member(&mut self, cursor: &mut Cursor<'a>, key: &str, policy: CutPolicy) -> Result<bool> {
        match key {
            "model" => self.model = cursor.text_or_null()?,
            "stream" => self.stream.on = cursor.flag()?.unwrap_or(false),
            "stream_options" => self.stream.include_usage = include_usage(cursor)?,
            "n" => self.n = cursor.value()?.as_u64(),
            "max_completion_tokens" => self.max_tokens = cursor.value()?.as_u64().or(self.max_tokens),
            "max_tokens" => self.max_tokens = self.max_tokens.or(cursor.value()?.as_u64()),
            "priority" => self.priority = cursor.value()?.as_i64(),
            "cache_salt" => {
                let start = cursor.position();
                self.cache_salt = cursor.text_or_null()?;
                self.cache_salt_at = Some(start..cursor.passed_to());
            }
            "user" => self.user = text_if(cursor)?,
            "session_id" => self.session_id = text_if(cursor)?,
            "prompt_cache_key" => self.prompt_cache_key = text_if(cursor)?,
            "mm_processor_kwargs" => self.mm_processor_kwargs = cursor.map()?,
            "media_io_kwargs" => self.media_io_kwargs = cursor.map()?,
            "add_special_tokens" => self.add_special_tokens = cursor.flag()?,
            "truncate_prompt_tokens" => self.truncate_prompt_tokens = cursor.present()?,
            "max_dynamic_patch" | "min_dynamic_patch" => option(cursor, key, &mut self.patch_options)?,
            "extra_key" => self.namespace = cursor.present()?.then_some("extra_key").or(self.namespace),
            "lora_path" => self.namespace = cursor.present()?.then_some("lora_path").or(self.namespace),
            "input_ids" => self.prompt_ids = cursor.present()?.then_some("input_ids").or(self.prompt_ids),
            "prompt_token_ids" => self.prompt_ids = cursor.present()?.then_some("prompt_token_ids").or(self.prompt_ids),
            "prompt_logprobs" => self.prompt_logprobs = cursor.present()?,
            "echo" => self.echo = cursor.value()? == Value::Bool(true),
            "logprobs" => self.logprobs = cursor.present()?,
            "vllm_xargs" => self.extra_args(cursor, policy)?,
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// Cuts of whole members of the body, and where it starts.
    pub(crate) fn cut_top(&mut self, members: &[Member<'_>], policy: CutPolicy) {
        self.insert_at = members.first().map_or(0, |member| member.span.start);
        if policy.transfer_params {
            self.cuts.extend(cut_members(members, |key| matches!(key, "kv_transfer_params" | "ec_transfer_params")));
        }
        self.cuts.sort_by_key(|cut| cut.start);
    }

    fn extra_args(&mut self, cursor: &mut Cursor<'a>, policy: CutPolicy) -> Result<()> {
        if cursor.kind()? != Kind::Object {
            return cursor.skip();
        }
        let members = cursor.object(|cursor, _| cursor.skip())?;
        if policy.report_mode {
            self.cuts.extend(cut_members(&members, |key| key == "kv_cache_report_mode"));
        }
        Ok(())
    }
}

/// Keeps the value of an option unless it is null.
pub(crate) fn option(cursor: &mut Cursor<'_>, key: &str, options: &mut Map<String, Value>) -> Result<()> {
    let value = cursor.value()?;
    if !value.is_null() {
        options.insert(key.to_owned(), value);
    }
    Ok(())
}

fn include_usage(cursor: &mut Cursor<'_>) -> Result<bool> {
    let mut on = false;
    if cursor.kind()? != Kind::Object {
        return cursor.skip().map(|()| false);
    }
    cursor.object(|cursor, key| {
        if key == "include_usage" {
            on = cursor.flag()?.unwrap_or(false);
            return Ok(());
        }
        cursor.skip()
    })?;
    Ok(on)
}

fn text_if<'a>(cursor: &mut Cursor<'a>) -> Result<Option<Cow<'a, str>>> {
    if cursor.kind()? == Kind::String { cursor.text().map(Some) } else { cursor.skip().map(|()| None) }
}
