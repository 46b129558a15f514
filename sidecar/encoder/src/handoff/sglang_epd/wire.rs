//! The two requests of SGLang's language server, and where it wants its rows. All of it is held to bounds before use.

use std::fmt;

use serde_json::Value;

use crate::format::pickle::Modality;

/// Items of one encode request, parts of one request, receivers of one part: at most.
pub const COUNT_MAX: u64 = 1024;
const TEXT_MAX: usize = 256;

/// `POST /encode`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EncodeRequest {
    /// Request id with the suffix of its part.
    pub req_id: String,
    /// URLs in order.
    pub urls: Vec<String>,
    pub modality: Modality,
    pub num_parts: u32,
    pub part_idx: u32,
    /// Where rows go at once (`zmq_to_tokenizer`); `None` when receivers announce themselves.
    pub direct: Option<Destination>,
}

/// `POST /scheduler_receive_url`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Receiver {
    pub req_id: String,
    /// Receivers that will announce themselves for this part.
    pub receive_count: u32,
    pub to: Destination,
}

/// A host and port of the language server's.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Destination {
    host: String,
    port: u16,
}

impl fmt::Display for Destination {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.host.contains(':') {
            true => write!(f, "tcp://[{}]:{}", self.host, self.port),
            false => write!(f, "tcp://{}:{}", self.host, self.port),
        }
    }
}

/// Hosts that rows may be sent to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Hosts {
    /// The endpoint is reachable by the engine alone.
    Any,
    Only(Vec<String>),
}

/// Why a request is answered 400.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WireError {
    #[error("body is no JSON object")]
    NoObject,
    #[error("{field} must be {expected}")]
    Field { field: &'static str, expected: &'static str },
    #[error("{field} names host {host}, to which nothing may be sent: add it to the allowed hosts")]
    Host { field: &'static str, host: String },
}

impl WireError {
    /// Body in SGLang's form.
    pub fn body(&self) -> String {
        serde_json::json!({"status": "error", "message": self.to_string()}).to_string()
    }
}

impl Destination {
    /// Reads `host:port`, with an IPv6 host in brackets.
    pub fn parse(text: &str) -> Option<Self> {
        let (host, port) = text.rsplit_once(':')?;
        let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
        Self::new(host, port.parse().ok()?)
    }

    fn new(host: &str, port: u16) -> Option<Self> {
        let letters = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'-' | b':' | b'_');
        let fine = !host.is_empty() && host.len() <= TEXT_MAX && host.bytes().all(letters) && port != 0;
        fine.then(|| Self { host: host.to_owned(), port })
    }

    pub fn host(&self) -> &str {
        &self.host
    }

    fn allowed(self, field: &'static str, hosts: &Hosts) -> Result<Self, WireError> {
        match hosts {
            Hosts::Only(list) if !list.contains(&self.host) => Err(WireError::Host { field, host: self.host }),
            _ => Ok(self),
        }
    }
}

/// Reads the body of `POST /encode`, whose size the caller has bounded.
///
/// # Errors
/// When a field is missing, of the wrong type or out of bounds.
pub fn parse_encode(body: &[u8], hosts: &Hosts) -> Result<EncodeRequest, WireError> {
    let json = object(body)?;
    let req_id = text(&json, "req_id")?;
    let items = json.get("mm_items").and_then(Value::as_array);
    let items = items.filter(|items| (1..=COUNT_MAX as usize).contains(&items.len()));
    let items = items.ok_or(field("mm_items", "a list of 1 to 1024 items"))?;
    let url = |item: &Value| item.as_str().or_else(|| item.get("url")?.as_str()).map(str::to_owned);
    let urls: Option<Vec<String>> = items.iter().map(url).collect();
    let urls = urls.ok_or(field("mm_items", "a list of URLs, or of objects with a url"))?;
    let modality = match json.get("modality").and_then(Value::as_str) {
        Some("IMAGE") => Modality::Image,
        Some("VIDEO") => Modality::Video,
        Some("AUDIO") => Modality::Audio,
        _ => return Err(field("modality", "IMAGE, VIDEO or AUDIO")),
    };
    let num_parts = count(&json, "num_parts")?;
    let part_idx = json.get("part_idx").and_then(Value::as_u64).filter(|&part| part < num_parts.into());
    let part_idx = part_idx.ok_or(field("part_idx", "a whole number below num_parts"))? as u32;
    let direct = match json.get("embedding_port") {
        Some(Value::Number(port)) => {
            let port = port.as_u64().and_then(|port| u16::try_from(port).ok());
            let port = port.ok_or(field("embedding_port", "a port"))?;
            let to = Destination::new(&text(&json, "prefill_host")?, port);
            Some(to.ok_or(field("prefill_host", "a host name or address"))?.allowed("prefill_host", hosts)?)
        }
        _ => None,
    };
    Ok(EncodeRequest { req_id, urls, modality, num_parts, part_idx, direct })
}

/// Reads the body of `POST /scheduler_receive_url`.
///
/// # Errors
/// When a field is missing, of the wrong type or out of bounds.
pub fn parse_receiver(body: &[u8], hosts: &Hosts) -> Result<Receiver, WireError> {
    let json = object(body)?;
    let to = Destination::parse(&text(&json, "receive_url")?).ok_or(field("receive_url", "host:port"))?;
    let to = to.allowed("receive_url", hosts)?;
    Ok(Receiver { req_id: text(&json, "req_id")?, receive_count: count(&json, "receive_count")?, to })
}

fn object(body: &[u8]) -> Result<Value, WireError> {
    serde_json::from_slice(body).ok().filter(Value::is_object).ok_or(WireError::NoObject)
}

fn field(field: &'static str, expected: &'static str) -> WireError {
    WireError::Field { field, expected }
}

fn text(json: &Value, name: &'static str) -> Result<String, WireError> {
    let found = json.get(name).and_then(Value::as_str).filter(|text| (1..=TEXT_MAX).contains(&text.len()));
    found.map(str::to_owned).ok_or(field(name, "a text of 1 to 256 bytes"))
}

fn count(json: &Value, name: &'static str) -> Result<u32, WireError> {
    let found = json.get(name).and_then(Value::as_u64).filter(|found| (1..=COUNT_MAX).contains(found));
    found.map(|found| found as u32).ok_or(field(name, "a whole number from 1 to 1024"))
}
