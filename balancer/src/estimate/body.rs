//! Request bodies as llm-d's estimator flattens them (llm-d-router ebab68792, `dataproducer/tokenizer/estimate.go`): texts and media
//! one after another, without template, tokenizer or separators.

use clap::ValueEnum;
use fovea_media::estimate::{Estimate, VideoHints, audio_tokens};
use serde::Deserialize;
use serde_json::Value;
use serde_json::value::RawValue;

use super::go_json;
use super::stream::Stream;

/// System blocks of Anthropic clients that begin so are left out.
const BILLING: &str = "x-anthropic-billing-header";

pub const NUMBER: &str = "JSON with a number other than a whole one up to 2^53 enters the prompt: how llm-d writes it is not known, so there are no block hashes";
pub const AUDIO_URL: &str =
    "audio_url is named by its URL here; llm-d does not read it and gives every one the same name";

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Api {
    /// OpenAI chat completions.
    Chat,
    /// Anthropic messages.
    Messages,
    Completions,
    /// OpenAI responses.
    Responses,
}

/// What a body is flattened by.
#[derive(Clone, Copy, Debug)]
pub struct Rules<'a> {
    pub estimate: &'a Estimate,
    /// Of every video in it.
    pub videos: VideoHints,
    /// Pseudo-tokens that are kept.
    pub tokens_max: usize,
}

#[derive(Debug)]
pub struct Flat {
    pub prompts: Vec<Stream>,
    /// Where llm-d and this differ, or may.
    pub notes: Vec<&'static str>,
    /// Every byte is known, so that blocks can be hashed.
    pub whole: bool,
}

#[derive(Debug, thiserror::Error)]
#[error("{place}: not what the {api:?} API takes; correct it, or choose another API with --api")]
pub struct BodyError {
    api: Api,
    place: String,
    #[source]
    source: serde_json::Error,
}

/// Flattens a body.
///
/// # Errors
/// When it is not JSON, or a field that is read has another type.
pub fn flatten(api: Api, body: &str, rules: Rules<'_>) -> Result<Flat, BodyError> {
    let fault = |place: &str, source| BodyError { api, place: place.to_owned(), source };
    let top = |source| fault("request body", source);
    let mut flat = Flattening { rules, stream: Stream::new(rules.tokens_max), notes: Vec::new(), whole: true };
    match api {
        Api::Chat | Api::Messages => {
            let body: Dialogue<'_> = serde_json::from_str(body).map_err(top)?;
            flat.tools(body.tools);
            if api == Api::Messages {
                flat.system(body.system).map_err(|source| fault("system", source))?;
            }
            for (index, message) in body.messages.unwrap_or_default().into_iter().enumerate() {
                flat.message(api, message).map_err(|source| fault(&format!("messages[{index}]"), source))?;
            }
        }
        Api::Responses => {
            let body: serde_json::Map<String, Value> = serde_json::from_str(body).map_err(top)?;
            let fields = ["instructions", "tools", "input"].map(|key| (key, body.get(key)));
            let fields = fields.into_iter().filter_map(|(key, value)| Some(serde_json::json!({ key: value? })));
            flat.json(&fields.collect());
        }
        Api::Completions => {
            let body: Completion = serde_json::from_str(body).map_err(top)?;
            return Ok(Flat { prompts: prompts(body.prompt, rules), notes: Vec::new(), whole: true });
        }
    }
    let Flattening { mut stream, notes, whole, .. } = flat;
    stream.align();
    Ok(Flat { prompts: vec![stream], notes, whole })
}

#[derive(Deserialize)]
struct Dialogue<'a> {
    tools: Option<Vec<Value>>,
    #[serde(borrow)]
    system: Option<&'a RawValue>,
    #[serde(borrow)]
    messages: Option<Vec<Message<'a>>>,
}

#[derive(Deserialize)]
struct Message<'a> {
    role: Option<String>,
    #[serde(borrow)]
    content: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct Part<'a> {
    #[serde(rename = "type")]
    kind: Option<String>,
    text: Option<String>,
    thinking: Option<String>,
    id: Option<String>,
    name: Option<String>,
    /// Of a tool's use: its bytes count, not its value.
    #[serde(borrow)]
    input: Option<&'a RawValue>,
    /// Of a tool's result.
    #[serde(borrow)]
    content: Option<&'a RawValue>,
    image_url: Option<Link>,
    video_url: Option<Link>,
    audio_url: Option<Link>,
    input_audio: Option<Audio>,
    source: Option<Source>,
}

#[derive(Default, Deserialize)]
#[serde(expecting = "an object with a `url`")]
struct Link {
    url: Option<String>,
}

#[derive(Default, Deserialize)]
#[serde(expecting = "an object with `data` and `format`")]
struct Audio {
    data: Option<String>,
    format: Option<String>,
}

#[derive(Default, Deserialize)]
#[serde(expecting = "an object with a `url`, or with `data`")]
struct Source {
    url: Option<String>,
    media_type: Option<String>,
    data: Option<String>,
}

#[derive(Deserialize)]
struct Completion {
    prompt: Prompt,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Prompt {
    Text(String),
    Tokens(Vec<u32>),
    Texts(Vec<String>),
}

enum Content<'a> {
    Text(String),
    Parts(Vec<Part<'a>>),
}

fn content(raw: Option<&RawValue>) -> Result<Content<'_>, serde_json::Error> {
    let json = raw.map_or("[]", RawValue::get);
    if json.starts_with('"') {
        serde_json::from_str(json).map(Content::Text)
    } else {
        serde_json::from_str(json).map(Content::Parts)
    }
}

fn prompts(prompt: Prompt, rules: Rules<'_>) -> Vec<Stream> {
    let text = |text: String| {
        let mut stream = Stream::new(rules.tokens_max);
        stream.text(&text);
        stream.align();
        stream
    };
    match prompt {
        Prompt::Text(one) => vec![text(one)],
        Prompt::Texts(texts) => texts.into_iter().map(text).collect(),
        Prompt::Tokens(tokens) => {
            let mut stream = Stream::new(rules.tokens_max);
            tokens.into_iter().for_each(|token| stream.token(token));
            vec![stream]
        }
    }
}

struct Flattening<'a> {
    rules: Rules<'a>,
    stream: Stream,
    notes: Vec<&'static str>,
    whole: bool,
}

impl Flattening<'_> {
    fn note(&mut self, note: &'static str) {
        if !self.notes.contains(&note) {
            self.notes.push(note);
        }
    }

    fn json(&mut self, value: &Value) {
        match go_json::text(value) {
            Some(text) => self.stream.text(&text),
            None => {
                self.whole = false;
                self.note(NUMBER);
            }
        }
    }

    fn tools(&mut self, tools: Option<Vec<Value>>) {
        if let Some(tools) = tools.filter(|tools| !tools.is_empty()) {
            self.json(&Value::Array(tools));
        }
    }

    fn system(&mut self, system: Option<&RawValue>) -> Result<(), serde_json::Error> {
        match content(system)? {
            Content::Text(text) => self.stream.text(&text),
            Content::Parts(blocks) => {
                let texts = blocks.into_iter().filter(|block| block.kind.as_deref() == Some("text"));
                let texts = texts.filter_map(|block| block.text).filter(|text| !text.starts_with(BILLING));
                texts.for_each(|text| self.stream.text(&text));
            }
        }
        Ok(())
    }

    fn message(&mut self, api: Api, message: Message<'_>) -> Result<(), serde_json::Error> {
        self.stream.text(&message.role.unwrap_or_default());
        match content(message.content)? {
            Content::Text(text) => self.stream.text(&text),
            Content::Parts(parts) => {
                for part in parts {
                    if api == Api::Chat { self.chat_part(part) } else { self.block(part)? }
                }
            }
        }
        Ok(())
    }

    fn chat_part(&mut self, part: Part<'_>) {
        let url = |link: Option<Link>| link.unwrap_or_default().url.unwrap_or_default();
        match part.kind.as_deref() {
            Some("text") => self.stream.text(&part.text.unwrap_or_default()),
            Some("image_url") => self.image(&url(part.image_url)),
            Some("video_url") => {
                let tokens = self.rules.estimate.video_tokens(&self.rules.videos);
                self.stream.asset("video", &url(part.video_url), tokens);
            }
            Some("input_audio") => {
                let Audio { data, format } = part.input_audio.unwrap_or_default();
                let (data, format) = (data.unwrap_or_default(), format.unwrap_or_default());
                self.stream.asset("audio", &[data.as_str(), &format].concat(), audio_tokens(&data, &format));
            }
            Some("audio_url") => {
                self.note(AUDIO_URL);
                self.stream.asset("audio", &url(part.audio_url), 1);
            }
            _ => {}
        }
    }

    /// A content block of an Anthropic message. Its images are named by their bare payload, those of a tool's result by a `data:` URL.
    fn block(&mut self, part: Part<'_>) -> Result<(), serde_json::Error> {
        match part.kind.as_deref() {
            Some("text") => self.stream.text(&part.text.unwrap_or_default()),
            Some("thinking") => self.stream.text(&part.thinking.unwrap_or_default()),
            Some("image") => match part.source.unwrap_or_default() {
                Source { url: Some(url), .. } if !url.is_empty() => self.image(&url),
                Source { data: Some(data), .. } if !data.is_empty() => {
                    let tokens = self.rules.estimate.image_tokens(&format!("data:image/;base64,{data}"));
                    self.stream.asset("image", &data, tokens);
                }
                _ => {}
            },
            Some("tool_use") => {
                let input = part.input.map_or("", RawValue::get);
                [part.id.as_deref(), part.name.as_deref(), Some(input)]
                    .into_iter()
                    .flatten()
                    .for_each(|text| self.stream.text(text));
            }
            Some("tool_result") => match content(part.content)? {
                Content::Text(text) => self.stream.text(&text),
                Content::Parts(parts) => self.tool_result(parts),
            },
            _ => {}
        }
        Ok(())
    }

    fn tool_result(&mut self, parts: Vec<Part<'_>>) {
        let texts = parts.iter().filter(|part| part.kind.as_deref() == Some("text"));
        let texts: Vec<_> = texts.map(|part| part.text.as_deref().unwrap_or_default()).collect();
        self.stream.text(&texts.join("\n"));
        for part in parts.into_iter().filter(|part| part.kind.as_deref() == Some("image")) {
            match part.source.unwrap_or_default() {
                Source { url: Some(url), .. } if !url.is_empty() => self.image(&url),
                Source { data: Some(data), media_type, .. } if !data.is_empty() => {
                    let kind = media_type.filter(|kind| !kind.is_empty()).unwrap_or_else(|| "image/jpeg".to_owned());
                    self.image(&format!("data:{kind};base64,{data}"));
                }
                _ => {}
            }
        }
    }

    fn image(&mut self, url: &str) {
        self.stream.asset("image", url, self.rules.estimate.image_tokens(url));
    }
}
