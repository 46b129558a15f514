//! Captured vLLM traffic: what its own renderer says of a prompt comes true in the events, identities are learnt from them, and a
//! prediction that is wrong in one thing is found out.

#![expect(clippy::unwrap_used, reason = "a test: a vector that cannot be read is a failure")]

mod rank;

use std::collections::BTreeMap;

use fovea_gossip::message::LearntValue;
use fovea_gossip::preamble::Slot;
use fovea_kv::{BlockSize, MediaId, MediaKey, RoutingView, root, vllm};
use fovea_sidecar_core::verify::{Cause, Expected, FlightId, Found, Outcome, Reason, Shown, Verdict};
use rank::Rank;
use serde_json::Value;

const VECTORS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/vectors/vllm");
const BLOCK: u32 = 32;

/// Captured records of each run, in the order in which their events came.
fn runs() -> BTreeMap<String, Vec<Value>> {
    let mut runs = BTreeMap::<String, Vec<Value>>::new();
    for file in std::fs::read_dir(VECTORS).unwrap().map(|file| file.unwrap().path()) {
        if file.extension().is_none_or(|extension| extension != "jsonl") {
            continue;
        }
        for line in std::fs::read_to_string(&file).unwrap().lines() {
            let record: Value = serde_json::from_str(line).unwrap();
            if record["frames"].is_array() && record["decoded"].is_array() {
                runs.entry(record["run"].as_str().unwrap().to_owned()).or_default().push(record);
            }
        }
    }
    // A record without events has no place: it comes after all others, when its blocks are there.
    let place = |record: &Value| record["decoded"][0]["seq"].as_u64().unwrap_or(u64::MAX);
    runs.values_mut().for_each(|records| records.sort_by_key(place));
    runs
}

fn number(value: &Value) -> u32 {
    u32::try_from(value.as_u64().unwrap()).unwrap()
}

/// A prompt as the engine's renderer gives it.
#[derive(Clone)]
struct Prompt {
    tokens: Vec<u32>,
    /// Start, length, identity.
    images: Vec<(u32, u32, MediaId)>,
}

impl Prompt {
    /// `None` = no chat prompt, or one whose keys are digests of embeddings.
    fn of(record: &Value) -> Option<Self> {
        let tokens = record["render"]["token_ids"].as_array()?;
        if record["status"] != 200 || record["group"] == "bytes_prompt_embeds" {
            return None;
        }
        let ids = record["render"]["mm_hashes"]["image"].as_array().into_iter().flatten();
        let places = record["render"]["mm_placeholders"]["image"].as_array().into_iter().flatten();
        let image = |(id, place): (&Value, &Value)| {
            (number(&place["offset"]), number(&place["length"]), MediaId::from_engine_id(id.as_str().unwrap()))
        };
        Some(Self { tokens: tokens.iter().map(number).collect(), images: ids.zip(places).map(image).collect() })
    }

    fn expected(&self, record: &Value, known: bool) -> Expected {
        let mut view = RoutingView::default();
        self.tokens.iter().for_each(|&token| view.push(token, 1));
        if known {
            self.images.iter().for_each(|&(start, len, id)| view.mark(start, len, id));
        }
        let request = &record["request"];
        let lora = request["model"].as_str().filter(|model| model.starts_with("lora")).unwrap_or("");
        let slots = self.images.iter().map(|&(start, len, id)| Slot { start, len, key: key(id), known });
        Expected {
            prompt_tokens: view.len(),
            view,
            slots: slots.collect(),
            root: root(lora, request["cache_salt"].as_str().unwrap_or("")),
            block_size: BlockSize::new(BLOCK).unwrap(),
            exact: known || self.images.is_empty(),
            reused_tokens: 0,
            session: None,
            shown: Shown::Spans,
        }
    }

    fn blocks(&self) -> u32 {
        u32::try_from(self.tokens.len()).unwrap() / BLOCK
    }
}

/// What we might call an image of this identity.
fn key(id: MediaId) -> MediaKey {
    MediaKey(id.0.map(|byte| !byte))
}

/// Plays a run; `change` makes each prediction from the truth, or none.
fn play(
    records: &[Value],
    known: bool,
    change: impl Fn(&Prompt) -> Option<Prompt>,
) -> (Rank, Vec<(String, Prompt, Verdict)>) {
    let (mut rank, mut verdicts) = (Rank::new(), Vec::new());
    for (id, record) in (0..).map(FlightId).zip(records) {
        let predicted = Prompt::of(record).and_then(|prompt| change(&prompt));
        match &predicted {
            Some(prompt) => rank.begin(id, prompt.expected(record, known)),
            None => rank.verifier.begin_blind(id),
        }
        for frame in record["frames"].as_array().unwrap() {
            let payload = base64_simd::STANDARD.decode_to_vec(frame[2].as_str().unwrap()).unwrap();
            rank.apply(&vllm::decode(&payload).unwrap().events);
        }
        // The length alone is not to give a wrong prediction away: the events must.
        let cached_tokens = record["cached_tokens"].as_u64().map(|tokens| u32::try_from(tokens).unwrap());
        let found = rank.end(id, Outcome { cached_tokens, ..Outcome::default() });
        let name = format!("{}/{}/{}", record["run"], record["group"], record["name"]);
        verdicts.extend(found.into_iter().zip(predicted).map(|(verdict, prompt)| (name.clone(), prompt, verdict)));
    }
    (rank, verdicts)
}

#[test]
fn what_the_engine_renders_is_what_it_stores() {
    let mut exact = 0;
    for records in runs().values() {
        for (name, prompt, Verdict { found, cached, .. }) in play(records, true, |prompt| Some(prompt.clone())).1 {
            let expected = if prompt.blocks() == 0 { Found::Unchecked(Reason::NoBlocks) } else { Found::Exact };
            assert_eq!(found, expected, "{name}");
            assert!(cached.is_none_or(|(predicted, _)| predicted == 0), "{name}");
            exact += usize::from(found == Found::Exact);
        }
    }
    assert!(exact > 100, "{exact} prompts");
}

#[test]
fn identities_are_learnt_from_the_events() {
    let mut learnt = 0;
    for (run, records) in &runs() {
        let (rank, verdicts) = play(records, false, |prompt| Some(prompt.clone()));
        for (name, prompt, verdict) in &verdicts {
            assert!(!matches!(verdict.found, Found::Diverged { .. }), "{name}: {verdict:?}");
            for &(start, len, id) in &prompt.images {
                if start / BLOCK >= prompt.blocks() {
                    continue;
                }
                let (tokens, value) = rank.verifier.learnt(&key(id)).unwrap_or_else(|| panic!("{name} teaches {id}"));
                assert_eq!(value, LearntValue::Id(id), "{name}");
                assert!([0, len].contains(&tokens), "{name}");
                learnt += 1;
            }
        }
        let counters = rank.verifier.counters();
        assert_eq!((counters.conflicts, counters.irregular, counters.token_count), (0, 0, 0), "{run}");
    }
    assert!(learnt > 50, "{learnt} images");
}

/// Every prediction that `change` makes wrong is found out: as `cause` when the engine stored the block that it is wrong in.
#[track_caller]
fn check_wrong(cause: Cause, change: impl Fn(&Prompt) -> Option<Prompt>) {
    let (mut diverged, mut all) = (0, 0);
    for records in runs().values() {
        for (name, _, Verdict { found, .. }) in play(records, true, &change).1 {
            let is_found = matches!(found, Found::Diverged { cause: actual, .. } if actual == cause);
            let is_short = matches!(found, Found::Short { .. });
            assert!(is_found || is_short, "{name}: {found:?}");
            diverged += usize::from(is_found);
            all += 1;
        }
    }
    assert!(diverged * 2 > all && all > 20, "{diverged} of {all}");
}

/// Prompts of which something can be changed in the last full block.
#[test]
fn a_wrong_token_is_found() {
    check_wrong(Cause::Text, |prompt| {
        let last = (prompt.blocks().checked_sub(1)?) * BLOCK;
        let text = |at: &u32| prompt.images.iter().all(|&(start, len, _)| !(start..start + len).contains(at));
        let at = (last..last + BLOCK).find(text)?;
        let mut wrong = prompt.clone();
        wrong.tokens[at as usize] = 100_000;
        Some(wrong)
    });
}

#[test]
fn a_wrong_identity_is_found() {
    check_wrong(Cause::MediaIdentity, |prompt| {
        let mut wrong = prompt.clone();
        wrong.images.first_mut().filter(|(start, _, _)| start / BLOCK < prompt.blocks())?.2 = MediaId([7; 32]);
        Some(wrong)
    });
}

#[test]
fn a_wrong_count_is_found() {
    check_wrong(Cause::MediaCount, |prompt| {
        let mut wrong = prompt.clone();
        let &(start, len, _) =
            prompt.images.first().filter(|(start, len, _)| (start + len) / BLOCK < prompt.blocks())?;
        wrong.tokens.insert(start as usize, prompt.tokens[start as usize]);
        wrong.images[0].1 = len + 1;
        wrong.images[1..].iter_mut().for_each(|(start, _, _)| *start += 1);
        Some(wrong)
    });
}
