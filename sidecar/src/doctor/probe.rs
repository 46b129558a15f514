//! Two or three small requests with a picture that nobody else sends: what the answers and the events say of identity and reuse.
//!
//! One output token each, and a text before the picture that is never used again, so that nothing of other clients is touched or hit.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use fovea_gossip::message::EngineKind;
use serde_json::{Value, json};

use super::ask::{Answer, Ask};
use super::listen::{Listener, Marks};
use super::picture;

/// One request of the probe: it may wait behind others.
const REQUEST: Duration = Duration::from_secs(20);
/// Until the events of a request that was answered.
const EVENTS: Duration = Duration::from_secs(3);
/// Words after the picture, at least and at most. There are as many as two blocks have tokens, so that the picture's blocks are full.
const WORDS: (u32, u32) = (64, 2048);

/// What the probe needs to know.
pub struct Plan<'a> {
    pub kind: EngineKind,
    pub model: &'a str,
    /// Tokens; 0 = unknown.
    pub block_size: u32,
    pub max_model_len: u32,
    pub picture: bool,
    /// `session_id` comes back on events.
    pub sessions: bool,
    /// Data-parallel rank that is listened to, where there are several.
    pub rank: Option<u32>,
}

/// What came of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Probe {
    /// Not sent.
    Skipped(&'static str),
    /// No good answer, not even to plain text.
    Failed(Refused),
    Done(Box<Seen>),
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    /// Why it went without the picture.
    pub refused: Option<Refused>,
    /// The identity that was asked for.
    pub uuid: Option<String>,
    /// Of the first request, and of the same once more.
    pub usage: [Usage; 2],
    /// Events could be seen.
    pub listened: bool,
    pub first: Marks,
    /// The same picture after another text.
    pub again: Option<Marks>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refused {
    pub why: String,
    /// A fault of the engine's, not a request that its model cannot take.
    pub fault: bool,
}

/// Why a request was not served.
enum Unserved {
    Refused(Refused),
    /// No answer: another request would have none either.
    Silent(String),
}

impl Unserved {
    fn failed(self, which: &str) -> Probe {
        let Refused { why, fault } = match self {
            Self::Refused(refused) => refused,
            Self::Silent(why) => Refused { why, fault: true },
        };
        Probe::Failed(Refused { why: format!("{which}: {why}"), fault })
    }
}

/// As the answer's `usage` says.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    pub prompt_tokens: u64,
    pub cached_tokens: Option<u64>,
}

impl Seen {
    /// Most tokens that the second request can reuse: full blocks, and the last token is always computed.
    pub fn reusable(&self, block_size: u32) -> u64 {
        let size = u64::from(block_size.max(1));
        self.usage[1].prompt_tokens.saturating_sub(1) / size * size
    }
}

/// Texts and picture of one run.
struct Salt([u64; 4]);

impl Salt {
    /// Differs from run to run and from process to process.
    fn new() -> Self {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos());
        Self(std::array::from_fn(|index| {
            let mut hasher = RandomState::new().build_hasher();
            hasher.write_u128(now);
            hasher.write_usize(index);
            hasher.finish()
        }))
    }

    fn hex(&self) -> String {
        self.0.iter().map(|word| format!("{word:016x}")).collect()
    }

    fn seed(&self) -> [u8; 32] {
        std::array::from_fn(|index| self.0[index / 8].to_le_bytes()[index % 8])
    }
}

struct Prober<'a> {
    ask: &'a Ask,
    plan: &'a Plan<'a>,
    salt: Salt,
    picture: Option<String>,
}

/// Sends the probe, and listens where there is a listener.
pub async fn run(ask: &Ask, plan: &Plan<'_>, mut listener: Option<Listener>) -> Probe {
    let salt = Salt::new();
    let data = base64_simd::STANDARD.encode_to_string(picture::png(salt.seed()));
    let picture = plan.picture.then(|| format!("data:image/png;base64,{data}"));
    let mut prober = Prober { ask, plan, salt, picture };
    if let Some(listener) = &mut listener {
        listener.drain(ask).await;
    }
    let told = Refused { why: "the engine says that its model takes no images".into(), fault: false };
    let mut seen = Seen { refused: (!plan.picture).then_some(told), listened: listener.is_some(), ..Seen::default() };
    let first = match prober.send(0).await {
        Err(Unserved::Refused(refused)) if prober.picture.is_some() => {
            prober.picture = None;
            seen.refused = Some(refused);
            prober.send(0).await
        }
        first => first,
    };
    seen.usage[0] = match first {
        Ok(usage) => usage,
        Err(unserved) => return unserved.failed("a request for one token"),
    };
    seen.uuid = prober.uuid();
    if let Some(listener) = &mut listener {
        seen.first = prober.gather(listener, 0).await;
    }
    seen.usage[1] = match prober.send(0).await {
        Ok(usage) => usage,
        Err(unserved) => return unserved.failed("the second of two equal requests for one token"),
    };
    if let (Some(listener), true, true) = (&mut listener, plan.kind != EngineKind::Vllm, prober.picture.is_some()) {
        match prober.send(1).await {
            Ok(_) => seen.again = Some(prober.gather(listener, 1).await),
            Err(unserved) => return unserved.failed("the third request for one token"),
        }
    }
    Probe::Done(Box::new(seen))
}

impl Prober<'_> {
    /// Only vLLM takes an identity with a part.
    fn uuid(&self) -> Option<String> {
        (self.plan.kind == EngineKind::Vllm && self.picture.is_some()).then(|| self.salt.hex())
    }

    fn session(&self, text: usize) -> Option<String> {
        self.plan.sessions.then(|| format!("fovea-doctor-{:016x}-{text}", self.salt.0[0]))
    }

    /// The request with text 0 or 1 before the picture.
    fn body(&self, text: usize) -> Value {
        let plan = self.plan;
        let room = if plan.max_model_len == 0 { WORDS.1 } else { plan.max_model_len / 4 };
        let words = plan.block_size.saturating_mul(2).clamp(WORDS.0, WORDS.1).min(room);
        let mut parts = vec![json!({"type": "text", "text": format!("fovea doctor {:016x}", self.salt.0[text])})];
        if let Some(url) = &self.picture {
            let mut part = json!({"type": "image_url", "image_url": {"url": url}});
            if let Some(uuid) = self.uuid() {
                part["uuid"] = uuid.into();
            }
            parts.push(part);
        }
        parts.push(json!({"type": "text", "text": " a".repeat(words as usize)}));
        let mut body = json!({"model": plan.model, "max_tokens": 1, "temperature": 0, "stream": false,
            "messages": [{"role": "user", "content": parts}]});
        if let Some(session) = self.session(text) {
            body["session_id"] = session.into();
        }
        body
    }

    async fn send(&self, text: usize) -> Result<Usage, Unserved> {
        let answer = self.ask.post("/v1/chat/completions", &self.body(text), self.plan.rank, REQUEST).await;
        let answer = answer.map_err(|error| Unserved::Silent(error.to_string()))?;
        if answer.status.is_success() {
            return Ok(usage(&answer));
        }
        let why = format!("answered {}: {}", answer.status.as_u16(), answer.message());
        Err(Unserved::Refused(Refused { why, fault: answer.status.is_server_error() }))
    }

    async fn gather(&self, listener: &mut Listener, text: usize) -> Marks {
        let (picture, uuid) = (self.picture.is_some(), self.uuid());
        let enough = |marks: &Marks| match &uuid {
            Some(uuid) => marks.media.contains(uuid),
            None if picture => !marks.media.is_empty() || !marks.pads.is_empty(),
            None => marks.blocks > 0,
        };
        listener.gather(self.ask, self.session(text).as_deref(), EVENTS, enough).await
    }
}

fn usage(answer: &Answer) -> Usage {
    let json = answer.json();
    let number = |path| json.pointer(path).and_then(Value::as_u64);
    Usage {
        prompt_tokens: number("/usage/prompt_tokens").unwrap_or(0),
        cached_tokens: number("/usage/prompt_tokens_details/cached_tokens"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_share_neither_text_nor_picture() {
        let (a, b) = (Salt::new(), Salt::new());
        assert_ne!(a.hex(), b.hex());
        assert_ne!(a.seed(), b.seed());
        assert!(fovea_kv::MediaId::from_hex(&a.hex()).is_some());
    }

    #[test]
    fn the_last_token_and_a_partial_block_are_never_reused() {
        let seen = |prompt_tokens| Seen {
            usage: [Usage::default(), Usage { prompt_tokens, cached_tokens: None }],
            ..Seen::default()
        };
        for (prompt, size, expect) in [(64, 16, 48), (65, 16, 64), (66, 1, 65), (10, 16, 0), (0, 0, 0)] {
            assert_eq!(seen(prompt).reusable(size), expect, "{prompt}/{size}");
        }
    }
}
