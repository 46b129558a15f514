//! The images of one chat, read out of its body: bounded before they are decoded, and named as the engine is to know them.

use std::ops::Range;

use bytes::Bytes;
use fovea_kv::MediaId;
use fovea_media::identity::vllm_image_id;
use fovea_media::{data_url, header};
use fovea_openai::{ChatRequest, Hazard, MediaKind, MediaPart};

use super::fault::Fault;
use crate::config::encoder::ImagesConfig;

/// One image and the place of its part in the body.
#[derive(Clone, Debug)]
pub struct Image {
    pub index: usize,
    /// The whole part.
    pub at: Range<usize>,
    /// Where a balancer's record would name it.
    pub insert_at: usize,
    pub bytes: Bytes,
    /// vLLM's own name for these bytes.
    pub media: MediaId,
    /// Rows that a balancer counted.
    pub rows: Option<u32>,
}

/// What a chat body has for this step.
#[derive(Clone, Debug, Default)]
pub struct Read {
    pub images: Vec<Image>,
    pub hazard: Option<Hazard>,
}

/// Why it cannot be told.
#[derive(Debug)]
pub enum ReadError {
    Json(String),
    Fault(Fault),
}

impl From<Fault> for ReadError {
    fn from(fault: Fault) -> Self {
        Self::Fault(fault)
    }
}

/// Reads a chat body. Decodes and hashes: call it where blocking is allowed.
///
/// # Errors
/// JSON that cannot be read, or the first thing that is wrong with an image, in order.
pub fn read(body: &[u8], limits: &ImagesConfig, engine_model: &str) -> Result<Read, ReadError> {
    let text = std::str::from_utf8(body)
        .map_err(|error| ReadError::Json(format!("not utf-8 at byte {}; send utf-8", error.valid_up_to())))?;
    let chat = ChatRequest::parse(text).map_err(|error| ReadError::Json(error.to_string()))?;
    let hazard = chat.hazard(false);
    let parts: Vec<&MediaPart<'_>> = chat.media.iter().filter(|part| part.kind == MediaKind::Image).collect();
    if hazard.is_some() || parts.is_empty() {
        return Ok(Read { images: Vec::new(), hazard });
    }
    if parts.len() > limits.count_max {
        return Err(Fault::TooManyImages { found: parts.len(), max: limits.count_max }.into());
    }
    // With either, vLLM looks for a hash that no file has, and ends.
    let common = &chat.common;
    for (field, map) in
        [("mm_processor_kwargs", &common.mm_processor_kwargs), ("media_io_kwargs", &common.media_io_kwargs)]
    {
        if !map.is_empty() {
            return Err(Fault::Options { field }.into());
        }
    }
    if chat.media.iter().any(|part| part.kind == MediaKind::Video) {
        return Err(Fault::Video.into());
    }
    let one = |(index, part): (usize, &&MediaPart<'_>)| image(index, part, limits, engine_model);
    Ok(Read { images: parts.iter().enumerate().map(one).collect::<Result<_, _>>()?, hazard })
}

fn image(index: usize, part: &MediaPart<'_>, limits: &ImagesConfig, engine_model: &str) -> Result<Image, Fault> {
    let data = |problem: &str| Fault::Data { index, problem: problem.to_owned() };
    let url = part.url.as_deref().ok_or_else(|| data("has no `url`; send a `data:` URL"))?;
    if !data_url::is_data_url(url) {
        return Err(Fault::Url { index });
    }
    let max = limits.bytes_max.as_u64();
    // Four characters of base64 are three bytes; the rest is room for the type before them.
    if url.len() as u64 > max.saturating_mul(4) / 3 + 256 {
        return Err(Fault::TooManyBytes { index, max });
    }
    let bytes = data_url::decode(url).map_err(|_| data("is no base64 of a `data:` URL; encode it anew"))?;
    if bytes.len() as u64 > max {
        return Err(Fault::TooManyBytes { index, max });
    }
    let header = header::read(&bytes).map_err(|error| Fault::Data { index, problem: error.to_string() })?;
    let (width, height, max) = (header.width, header.height, limits.pixels_max);
    if u64::from(width) * u64::from(height) > max {
        return Err(Fault::TooManyPixels { index, width, height, max });
    }
    let media = vllm_image_id(&bytes, header.converted, engine_model);
    Ok(Image { index, at: part.at.clone(), insert_at: part.insert_at, bytes: bytes.into(), media, rows: None })
}

#[cfg(test)]
mod tests {
    use fovea_service::config::ByteSize;

    use super::*;

    const PNG: &str = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4z8AAAAMBAQDJ/pLvAAAAAElFTkSuQmCC";

    fn body(parts: &str, rest: &str) -> String {
        format!(r#"{{"model":"m","messages":[{{"role":"user","content":[{parts}]}}]{rest}}}"#)
    }

    fn part(url: &str) -> String {
        format!(r#"{{"type":"image_url","image_url":{{"url":"{url}"}}}}"#)
    }

    fn found(body: &str) -> Result<Read, ReadError> {
        let limits = ImagesConfig { count_max: 2, bytes_max: ByteSize(1000), pixels_max: 100 };
        read(body.as_bytes(), &limits, "m")
    }

    #[track_caller]
    fn refused(body: &str, expect: &Fault) {
        match found(body) {
            Err(ReadError::Fault(fault)) => assert_eq!(fault, *expect),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_part_is_found_whole_and_named_by_bytes_and_model() {
        let url = format!("data:image/png;base64,{PNG}");
        let text = body(&format!(r#"{{"type":"text","text":"a"}},{}"#, part(&url)), "");
        let read = found(&text).unwrap();
        let [image] = &read.images[..] else { panic!("{read:?}") };
        assert_eq!(text[image.at.clone()], part(&url));
        assert_eq!(image.insert_at, image.at.start + 1);
        assert_eq!(image.media, vllm_image_id(&image.bytes, false, "m"));
    }

    #[test]
    fn what_an_encoder_cannot_take_is_refused_with_its_place() {
        let good = part(&format!("data:image/png;base64,{PNG}"));
        refused(&body(&format!("{good},{}", part("http://h/a.png")), ""), &Fault::Url { index: 1 });
        refused(&body(&format!("{good},{good},{good}"), ""), &Fault::TooManyImages { found: 3, max: 2 });
        let long = part(&format!("data:image/png;base64,{}", "A".repeat(2000)));
        refused(&body(&long, ""), &Fault::TooManyBytes { index: 0, max: 1000 });
        let options = r#","mm_processor_kwargs":{"a":1}"#;
        refused(&body(&good, options), &Fault::Options { field: "mm_processor_kwargs" });
        let video = r#"{"type":"video_url","video_url":{"url":"data:,x"}}"#;
        refused(&body(&format!("{good},{video}"), ""), &Fault::Video);
    }

    #[test]
    fn a_chat_without_images_passes_and_clients_embeddings_do_not() {
        let read = found(&body(r#"{"type":"text","text":"a"}"#, "")).unwrap();
        assert!(read.images.is_empty() && read.hazard.is_none());
        let embeds = r#"{"type":"image_embeds","image_embeds":{"image_embeds":"AA"}}"#;
        assert!(found(&body(embeds, "")).unwrap().hazard.is_some());
    }
}
