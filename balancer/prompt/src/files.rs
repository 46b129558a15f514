//! The files of a model directory, and which chat template an engine takes from them.

use std::fs::File;
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use crate::error::LoadError;

/// Larger than any published tokenizer.json (Gemma 3: 33 MB).
const FILE_MAX: u64 = 256 << 20;

/// A template and the file it came from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Source {
    pub path: PathBuf,
    pub text: String,
}

/// What a model directory holds, besides the tokenizer itself.
#[derive(Debug, Default)]
pub(crate) struct Files {
    /// Without tools: the processor's template comes first.
    pub plain: Option<Source>,
    /// With tools: the tokenizer's template comes first, and its `tool_use` variant.
    pub tools: Option<Source>,
    /// `bos_token` and the like: variables of every template.
    pub special_tokens: Map<String, Value>,
}

impl Files {
    pub fn read(dir: &Path) -> Result<Self, LoadError> {
        let config_path = dir.join("tokenizer_config.json");
        let config = read_json(&config_path)?.unwrap_or_default();
        let special_tokens =
            special_tokens(&config, &read_json(&dir.join("special_tokens_map.json"))?.unwrap_or_default());
        let jinja_path = dir.join("chat_template.jinja");
        let jinja = read(&jinja_path)?.map(|text| Source { path: jinja_path, text });
        let processor_path = dir.join("chat_template.json");
        let processor = read_json(&processor_path)?.and_then(|file| named(&file, "default", &processor_path));
        let own = named(&config, "default", &config_path);
        let tool_use = named(&config, "tool_use", &config_path);
        let plain = jinja.clone().or(processor.clone()).or(own.clone());
        let tools = jinja.or(tool_use).or(own).or(processor);
        Ok(Self { plain, tools, special_tokens })
    }
}

/// Reads a text file; `None` when there is none.
pub(crate) fn read(path: &Path) -> Result<Option<String>, LoadError> {
    let fault = |source| LoadError::Read { path: path.to_owned(), source };
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(fault(error)),
    };
    let mut text = String::new();
    let len = file.take(FILE_MAX + 1).read_to_string(&mut text).map_err(fault)?;
    if len as u64 > FILE_MAX {
        return Err(LoadError::TooLarge { path: path.to_owned(), limit_bytes: FILE_MAX });
    }
    Ok(Some(text))
}

fn read_json(path: &Path) -> Result<Option<Value>, LoadError> {
    let parse =
        |text: String| serde_json::from_str(&text).map_err(|source| LoadError::Json { path: path.to_owned(), source });
    read(path)?.map(parse).transpose()
}

/// `chat_template` of a file: one text (the default), or a list of named ones.
fn named(file: &Value, name: &str, path: &Path) -> Option<Source> {
    let text = match file.get("chat_template")? {
        Value::String(text) if name == "default" => text,
        Value::Array(list) => list.iter().find(|entry| entry["name"] == name)?["template"].as_str()?,
        _ => return None,
    };
    Some(Source { path: path.to_owned(), text: text.to_owned() })
}

/// Named special tokens: `…_token` texts of the config, of its extra map, and of the older separate file.
fn special_tokens(config: &Value, map: &Value) -> Map<String, Value> {
    let content = |value: &Value| match value {
        Value::String(text) => Some(text.clone()),
        Value::Object(token) => token.get("content")?.as_str().map(str::to_owned),
        _ => None,
    };
    let mut tokens = Map::new();
    for file in [map, config, &config["extra_special_tokens"]] {
        for (key, value) in file.as_object().into_iter().flatten().filter(|(key, _)| key.ends_with("_token")) {
            if let Some(text) = content(value) {
                tokens.insert(key.clone(), Value::String(text));
            }
        }
    }
    if let Some(list) = config["additional_special_tokens"].as_array() {
        let texts = list.iter().filter_map(content).map(Value::String).collect();
        tokens.insert("additional_special_tokens".to_owned(), Value::Array(texts));
    }
    tokens
}
