//! Event samples of `tests/vectors/trtllm/README.md`: bodies of the event queue, and batches of the publisher written as JSON.

use anyhow::{Context, Result};
use fovea_kv::event::Batch;
use fovea_kv::trtllm::{self, Media, Pulled, Puller};
use serde_json::Value;

use super::pack::pack;
use super::{Capture, Numbered};

/// Sections whose name begins so are bodies of the queue.
const QUEUE: &str = "buffered_events";
const PUSH: &str = "zmq_push_wire";

pub(super) fn are_in(value: &Value) -> bool {
    value.as_object().is_some_and(|sections| sections.keys().any(|name| name == PUSH || name.starts_with(QUEUE)))
}

/// Appends a record per event of the queue and per batch of the publisher.
pub(super) fn read(value: &Value, media: Media, captures: &mut Vec<Capture>) -> Result<()> {
    let own = Media::of_config(value);
    let media =
        Media { placeholder: media.placeholder.or(own.placeholder), vocab_size: media.vocab_size.or(own.vocab_size) };
    for (section, value) in value.as_object().into_iter().flatten() {
        if section.starts_with(QUEUE) {
            queue(section, value, media, captures).with_context(|| section.clone())?;
        } else if section == PUSH {
            let batch = trtllm::push(&pack(&value["batch"]), media);
            captures.push(capture(section, Numbered { seq: 0, batch }));
        }
    }
    Ok(())
}

fn queue(section: &str, body: &Value, media: Media, captures: &mut Vec<Capture>) -> Result<()> {
    let pulled = Puller::new(media).pull(body.to_string().as_bytes())?;
    // One event may come in several parts.
    for parts in pulled.chunk_by(|a, b| (a.rank, a.event_id) == (b.rank, b.event_id)) {
        let mut batch = Batch { rank: parts[0].rank, ..Batch::default() };
        for Pulled { event, .. } in parts {
            match event {
                Ok(event) => batch.events.push(event.clone()),
                Err(cause) => batch.skipped.push(*cause),
            }
        }
        captures.push(capture(section, Numbered { seq: parts[0].event_id, batch: Ok(batch) }));
    }
    Ok(())
}

/// A section is a run; in it the events of each rank are numbered by themselves.
fn capture(section: &str, batch: Numbered) -> Capture {
    let rank = batch.batch.as_ref().map_or(0, |batch| batch.rank);
    let run = if rank == 0 { section.to_owned() } else { format!("{section}/rank{rank}") };
    let order = Some(batch.seq);
    Capture { name: format!("{run}/{}", batch.seq), run, group: String::new(), batches: vec![batch], order }
}
