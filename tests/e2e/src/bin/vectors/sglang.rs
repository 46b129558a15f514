//! SGLang captures (scenarios of `tests/vectors/sglang/README.md`): each request is predicted from its expanded prompt alone, images with
//! the pads that the closed loop learnt from earlier events, and compared with what the engine holds after it.
//!
//! A request with an image that is not known yet is predicted up to the block of the image before its events are looked at, and in full
//! after. Every scenario is checked with the engine's pages as blocks and with two pages in a block.

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use fovea_gossip::message::LearntValue;
use fovea_gossip::preamble::Slot;
use fovea_kv::event::KvEvent;
use fovea_kv::regroup::Regroup;
use fovea_kv::sglang::{self, token};
use fovea_kv::{BlockSize, EngineHash, MediaKey, RoutingView, SequenceHash, root};
use fovea_sidecar_core::publish::{self, Publisher};
use fovea_sidecar_core::verify::{self, Expected, FlightId, Found, Outcome, Shown, Verifier};
use serde_json::Value;

use super::{Args, Tally, decode_file};

/// Salts show in events from this version on.
const SALT_SHOWN_FROM: (u64, u64, u64) = (0, 5, 18);

pub fn check(args: &Args, tally: &mut Tally) -> anyhow::Result<()> {
    for path in json_files(&args.dir)? {
        let text = std::fs::read_to_string(&path)?;
        let scenario: Value = serde_json::from_str(&text).with_context(|| path.display().to_string())?;
        if scenario["steps"].is_array() {
            let lines = decode_file(args, Path::new(""), &text)?;
            check_scenario(&scenario, &lines, tally).with_context(|| path.display().to_string())?;
        }
    }
    Ok(())
}

/// The files of a version's folder, or of the folders in `dir`.
fn json_files(dir: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir).with_context(|| dir.display().to_string())? {
        let path = entry?.path();
        if path.is_dir() {
            found.extend(json_files(&path)?);
        } else if path.extension().is_some_and(|extension| extension == "json") {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}

/// One engine as a sidecar beside it sees it.
struct Sight {
    regroup: Regroup,
    publisher: Publisher,
    verifier: Verifier,
    block_size: BlockSize,
    pairs: bool,
    placeholder: u32,
    now: Instant,
}

/// What a request is, and what was said of it before its events were seen.
struct Asked {
    request: Value,
    root: SequenceHash,
    /// Hashes of the blocks before the first unknown image; all when there is none.
    before: Vec<SequenceHash>,
    /// It has an unknown image.
    is_first_sight: bool,
}

fn check_scenario(scenario: &Value, lines: &[Value], tally: &mut Tally) -> anyhow::Result<()> {
    let steps = scenario["steps"].as_array().context("a scenario has steps")?;
    ensure!(lines.len() == steps.len(), "decode gave {} lines for {} steps", lines.len(), steps.len());
    let salts_show = version(&scenario["meta"]["sglang"])? >= SALT_SHOWN_FROM;
    let (mut pages, mut blocks) = (Sight::new(scenario, 1)?, Sight::new(scenario, 2)?);
    for (index, (step, line)) in steps.iter().zip(lines).enumerate() {
        let unsupported = match &step["request"] {
            request if request["extra_key"].is_string() => Some("extra_key is not in the events"),
            request if request["cache_salt"].is_string() && !salts_show => Some("cache_salt is not in the events"),
            _ => None,
        };
        let asked = step["request"].is_object() && unsupported.is_none();
        let in_pages = pages.step(index, step, asked)?;
        let in_blocks = blocks.step(index, step, asked)?;
        if let Some(reason) = unsupported {
            *tally.unsupported.entry(reason).or_default() += 1;
        }
        let Some((in_pages, in_blocks)) = in_pages.zip(in_blocks) else { continue };
        tally.supported += 1;
        match in_pages.and_then(|compared| in_blocks.map(|_| compared)).and_then(|compared| agrees(line, compared)) {
            Ok(()) => tally.exact += 1,
            Err(why) => eprintln!("differs: {} step {index}: {why}", scenario["meta"]["sglang"]),
        }
    }
    Ok(())
}

/// Whether the program tells the same blocks, and none was stored that was not predicted.
fn agrees(line: &Value, (predicted, stored): (Vec<SequenceHash>, HashSet<SequenceHash>)) -> Result<(), String> {
    let told: HashSet<_> = line["stored"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    let names: Vec<_> = stored.iter().map(SequenceHash::to_string).collect();
    if told != names.iter().map(String::as_str).collect() {
        return Err("fovea-sidecar decode tells other blocks".to_owned());
    }
    match stored.iter().filter(|hash| !predicted.contains(hash)).count() {
        0 => Ok(()),
        more => Err(format!("{more} blocks were stored that were not predicted")),
    }
}

/// What was predicted of a step's request, and what its events stored; or how they differ.
type Compared = Result<(Vec<SequenceHash>, HashSet<SequenceHash>), String>;

impl Sight {
    fn new(scenario: &Value, pages_per_block: u32) -> anyhow::Result<Self> {
        let number = |name: &str| scenario[name].as_u64().and_then(|n| u32::try_from(n).ok()).context(name.to_owned());
        let size = number("page_size")? * pages_per_block;
        Ok(Self {
            regroup: Regroup::new(pages_per_block),
            publisher: Publisher::new(publish::Config::default()),
            verifier: Verifier::new(verify::Config::default()),
            block_size: BlockSize::new(size).context("page_size")?,
            pairs: false,
            placeholder: number("image_token_id")?,
            now: Instant::now(),
        })
    }

    /// Takes one step; `None` when nothing was asked.
    fn step(&mut self, index: usize, step: &Value, asked: bool) -> anyhow::Result<Option<Compared>> {
        let batch = match step["frame"]["payload_hex"].as_str() {
            Some(payload) => sglang::decode(&hex(payload)?)?,
            None => fovea_kv::event::Batch::default(),
        };
        ensure!(batch.skipped.is_empty(), "step {index} has events that are not understood");
        // Known in production from the first event; the captures have one request.
        self.pairs |= batch.pairs;
        let asked = asked.then(|| self.ask(index, &step["request"])).transpose()?;
        let (mut stored, mut events) = (HashSet::new(), Vec::new());
        batch.events.into_iter().for_each(|event| self.regroup.apply(event, &mut events));
        for event in events {
            self.publisher.apply(&event);
            self.tell(&event, &mut stored)?;
        }
        let Some(asked) = asked else { return Ok(None) };
        self.verifier.finished(FlightId(index as u64), Outcome::default(), self.now);
        self.now += Duration::from_secs(1);
        let verdicts = self.verifier.settle(|hash| self.publisher.holds(hash), self.now);
        let found: Vec<_> = verdicts.iter().map(|verdict| verdict.found).collect();
        // The closed loop judges no request whose images it had to learn.
        let judged = if asked.is_first_sight {
            matches!(found[..], [Found::Exact | Found::Unchecked(_)])
        } else {
            found == [Found::Exact]
        };
        if !judged {
            return Ok(Some(Err(format!("the closed loop says {found:?}"))));
        }
        self.compare(&asked, stored).map(Some)
    }

    fn ask(&mut self, index: usize, request: &Value) -> anyhow::Result<Asked> {
        let root = root("", request["cache_salt"].as_str().unwrap_or(""));
        let (view, slots) = self.view(request)?;
        let known = slots.iter().find(|slot| !slot.known).map_or(view.len(), |slot| slot.start);
        let mut before = Vec::new();
        let mut certain = view.clone();
        certain.truncate(known);
        certain.sequence_hashes(self.block_size, root, &mut before);
        let is_first_sight = slots.iter().any(|slot| !slot.known);
        let expected = Expected {
            prompt_tokens: view.len(),
            exact: !is_first_sight,
            view,
            slots,
            root,
            block_size: self.block_size,
            reused_tokens: 0,
            session: request["session_id"].as_str().map(Into::into),
            shown: if self.pairs { Shown::Pairs } else { Shown::Pads },
        };
        self.verifier.begin(FlightId(index as u64), expected, self.now);
        Ok(Asked { request: request.clone(), root, before, is_first_sight })
    }

    fn tell(&mut self, event: &KvEvent, stored: &mut HashSet<SequenceHash>) -> anyhow::Result<()> {
        match event {
            KvEvent::Stored(event) => {
                let name = |hash: &EngineHash| self.publisher.translate(*hash, 0);
                let hashes: Vec<_> = event.hashes.iter().map(name).collect();
                ensure!(hashes.iter().all(Option::is_some), "a stored block has no hash");
                stored.extend(hashes.iter().flatten());
                self.verifier.stored(event, event.parent.as_ref().and_then(name), &hashes);
            }
            KvEvent::Removed(_) => {}
            KvEvent::Cleared => self.verifier.cleared(),
        }
        Ok(())
    }

    fn compare(&self, asked: &Asked, stored: HashSet<SequenceHash>) -> anyhow::Result<Compared> {
        let (view, slots) = self.view(&asked.request)?;
        if let Some(slot) = slots.iter().find(|slot| !slot.known) {
            return Ok(Err(format!("the image at {} was not learnt", slot.start)));
        }
        let mut predicted = Vec::new();
        view.sequence_hashes(self.block_size, asked.root, &mut predicted);
        if !predicted.starts_with(&asked.before) {
            return Ok(Err("the blocks before the image were predicted otherwise".to_owned()));
        }
        Ok(match predicted.iter().position(|&hash| !self.publisher.holds(hash)) {
            Some(block) => Err(format!("block {block} of {} is not held", predicted.len())),
            None => Ok((predicted, stored)),
        })
    }

    /// The routing view: text as it is, images as the pads that are known of them, else as placeholders.
    fn view(&self, request: &Value) -> anyhow::Result<(RoutingView, Vec<Slot>)> {
        let number = |value: &Value| value.as_u64().context("a number");
        let ids = request["placeholder_ids"].as_array().context("placeholder_ids")?;
        let mut ids = ids.iter().map(|id| number(id).map(token));
        let (mut view, mut slots) = (RoutingView::default(), Vec::new());
        for image in request["images"].as_array().into_iter().flatten() {
            let start = u32::try_from(number(&image["offset"][0])?)?;
            let len = u32::try_from(number(&image["tokens"])?)?;
            while view.len() < start {
                view.push(ids.next().context("an image lies behind the prompt")??, 1);
            }
            let name = image["hash_hex"].as_str().context("hash_hex")?;
            let key = MediaKey(*blake3::hash(name.as_bytes()).as_bytes());
            let known = match self.verifier.learnt(&key) {
                Some((_, LearntValue::Pads(pads))) => {
                    view.push_cycle(&pads, len);
                    true
                }
                Some(other) => bail!("{other:?} was learnt where pads belong"),
                None => {
                    view.push(self.placeholder, len);
                    false
                }
            };
            slots.push(Slot { start, len, key, known });
            ids.by_ref().take(len as usize).for_each(drop);
        }
        for id in ids {
            view.push(id?, 1);
        }
        Ok((if self.pairs { view.to_pairs() } else { view }, slots))
    }
}

fn version(text: &Value) -> anyhow::Result<(u64, u64, u64)> {
    let parts: Vec<_> = text.as_str().unwrap_or_default().split('.').map(str::parse).collect::<Result<_, _>>()?;
    let [major, minor, patch, ..] = parts[..] else { bail!("meta.sglang is no version: {text}") };
    Ok((major, minor, patch))
}

fn hex(text: &str) -> anyhow::Result<Vec<u8>> {
    ensure!(text.len().is_multiple_of(2) && text.is_ascii(), "a payload is no hex");
    (0..text.len()).step_by(2).map(|at| Ok(u8::from_str_radix(&text[at..at + 2], 16)?)).collect()
}
