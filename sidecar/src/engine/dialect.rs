//! What is particular to one engine family on a request's way: how identities and names are told to it, what empties its cache, how a
//! rank is pinned, and how identities show in its events. Its pages are in [`super::discover`], its events' bytes in `fovea-kv`.

use fovea_gossip::message::EngineKind;
use fovea_gossip::preamble::Preamble;
use fovea_sidecar_core::verify::Shown;
use http::HeaderName;

use super::version::Version;
use crate::proxy::headers;

/// From this release SGLang echoes a request's `session_id` in the events that it causes.
const SGLANG_SESSIONS: Version = Version(0, 5, 20);

/// A JSON member to put into the client's body behind this offset, with a comma at its end: a member follows always.
pub type Member = (u64, String);

/// One engine family.
pub trait Dialect: Sync {
    /// Calls after which the engine's cache is empty, which it tells late or never.
    fn clearing(&self) -> &'static [&'static str];

    /// Request header that pins a data-parallel rank.
    fn rank_header(&self) -> Option<HeaderName>;

    /// How media identities show in its events.
    fn shown(&self) -> Shown;

    /// Name by which a request's events can be told; `flight` is of this request alone. `None` = they cannot.
    fn session(&self, record: &Preamble, flight: u64, version: Option<Version>) -> Option<String>;

    /// What to tell the engine in the request's body, ascending by offset.
    fn members(&self, record: &Preamble, session: Option<&str>) -> Vec<Member>;
}

/// The dialect of a family.
pub fn of(kind: EngineKind) -> &'static dyn Dialect {
    match kind {
        EngineKind::Vllm => &Vllm,
        EngineKind::Sglang => &Sglang,
        EngineKind::TrtLlm => &TrtLlm,
    }
}

/// vLLM 0.32: member `uuid` of a media part is taken verbatim as the item's key.
struct Vllm;

impl Dialect for Vllm {
    /// `/pause` empties the cache unless told otherwise. `AllBlocksCleared` comes with the next batch only.
    fn clearing(&self) -> &'static [&'static str] {
        &["/reset_prefix_cache", "/sleep", "/pause"]
    }

    fn rank_header(&self) -> Option<HeaderName> {
        Some(headers::RANK)
    }

    fn shown(&self) -> Shown {
        Shown::Spans
    }

    fn session(&self, record: &Preamble, _flight: u64, _version: Option<Version>) -> Option<String> {
        record.session.clone()
    }

    fn members(&self, record: &Preamble, _session: Option<&str>) -> Vec<Member> {
        let uuid = |id| format!("\"uuid\":\"{id}\",");
        record.identities.iter().map(|identity| (identity.insert_at, uuid(identity.id))).collect()
    }
}

/// SGLang 0.5: identity is inside the tokens and cannot be set on chat requests (`mm_hashes` is for `/generate` alone, and ends
/// Qwen3-VL engines of 0.5.20 to 0.5.23); a session name makes its events attributable.
struct Sglang;

impl Dialect for Sglang {
    fn clearing(&self) -> &'static [&'static str] {
        &["/flush_cache", "/release_memory_occupation", "/update_weights_from_disk"]
    }

    fn rank_header(&self) -> Option<HeaderName> {
        Some(headers::RANK)
    }

    fn shown(&self) -> Shown {
        Shown::Pads
    }

    fn session(&self, record: &Preamble, flight: u64, version: Option<Version>) -> Option<String> {
        let echoed = version.is_some_and(|version| version >= SGLANG_SESSIONS);
        let own = || (record.body_at > 0).then(|| format!("fv-{flight:x}"));
        if echoed { record.session.clone().or_else(own) } else { None }
    }

    fn members(&self, record: &Preamble, session: Option<&str>) -> Vec<Member> {
        let named = session.filter(|_| record.session.is_none());
        named.map(|name| (record.body_at, format!("\"session_id\":\"{name}\","))).into_iter().collect()
    }
}

/// TensorRT-LLM 1.3: its HTTP side takes neither identities nor names.
struct TrtLlm;

impl Dialect for TrtLlm {
    fn clearing(&self) -> &'static [&'static str] {
        &["/release_memory", "/update_weights"]
    }

    fn rank_header(&self) -> Option<HeaderName> {
        None
    }

    fn shown(&self) -> Shown {
        Shown::Spans
    }

    fn session(&self, _record: &Preamble, _flight: u64, _version: Option<Version>) -> Option<String> {
        None
    }

    fn members(&self, _record: &Preamble, _session: Option<&str>) -> Vec<Member> {
        Vec::new()
    }
}

#[cfg(test)]
mod tests {
    use fovea_gossip::preamble::Identity;
    use fovea_kv::MediaId;

    use super::*;

    fn record() -> Preamble {
        let identity = Identity { insert_at: 40, id: MediaId([0xab; 32]), tokens: 4 };
        Preamble { identities: vec![identity], body_at: 1, ..Preamble::default() }
    }

    #[test]
    fn vllm_gets_identities_and_no_names() {
        let vllm = of(EngineKind::Vllm);
        let uuid = format!("\"uuid\":\"{}\",", "ab".repeat(32));
        assert_eq!(vllm.session(&record(), 5, Version::parse("0.32.0")), None);
        assert_eq!(vllm.members(&record(), None), [(40, uuid)]);
    }

    #[test]
    fn sglang_gets_a_name_where_it_echoes_names_and_the_client_set_none() {
        let sglang = of(EngineKind::Sglang);
        let session = |record: &Preamble, version| sglang.session(record, 0x1f, Version::parse(version));
        assert_eq!(session(&record(), "0.5.19"), None);
        assert_eq!(session(&record(), "0.5.20"), Some("fv-1f".to_owned()));
        assert_eq!(sglang.members(&record(), Some("fv-1f")), [(1, "\"session_id\":\"fv-1f\",".to_owned())]);
        let own = Preamble { session: Some("mine".into()), ..record() };
        assert_eq!(session(&own, "0.5.23"), Some("mine".to_owned()));
        assert_eq!(sglang.members(&own, Some("mine")), []);
        let unplaced = Preamble { body_at: 0, ..record() };
        assert_eq!(session(&unplaced, "0.5.23"), None);
    }

    #[test]
    fn trtllm_gets_nothing() {
        assert_eq!(of(EngineKind::TrtLlm).members(&record(), None), []);
    }
}
