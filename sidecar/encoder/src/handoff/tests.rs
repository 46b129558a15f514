use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::choose::{ChooseError, Engine, EngineKind, Mode, choose};
use super::ec_shm::EngineState;
use super::flags::{CommandLine, StartError, Verdict};
use super::image_embeds::ImageEmbeds;
use super::prompt_embeds::{Placed, PromptEmbeds, block_keys};
use super::trtllm::TrtImageEmbeds;
use super::*;
use crate::tensor::{DType, Embedding, EngineTensor, check};

fn vectors(name: &str) -> Vec<u8> {
    std::fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/vectors/encoder").join(name)).unwrap()
}

/// Hidden size 8, no deepstack, merge 2, bf16: what the golden files were made for.
fn model() -> EngineTensor {
    EngineTensor {
        model_type: "qwen2_5_vl".to_owned(),
        hidden: 8,
        levels: 0,
        merge: Some(2),
        vision: true,
        dtype: Some(DType::Bf16),
    }
}

fn image(model: &EngineTensor) -> EncodedImage {
    let data = vectors("formats/embeds_6x8_bf16.raw").into();
    let embedding = Embedding { rows: 6, width: 8, dtype: DType::Bf16, data, grid_thw: Some([1, 4, 6]) };
    EncodedImage { id: MediaId([0x5a; 32]), embedding: Arc::new(check(embedding, &model.expect(Some(6))).unwrap()) }
}

fn part_of(hand_off: &dyn HandOff, image: &EncodedImage) -> Value {
    let (part, _lease) = hand_off.part(image).unwrap();
    serde_json::from_slice(&part).unwrap()
}

#[test]
fn parts_are_those_that_vllm_took() {
    let formats: Value = serde_json::from_slice(&vectors("formats/formats.json")).unwrap();
    let golden = |name: &str| {
        let mut part = formats["chat_parts"][name].clone();
        part["uuid"] = json!("5a".repeat(32));
        part
    };
    let image = image(&model());
    assert_eq!(part_of(&ImageEmbeds::new(model()), &image), golden("with_tensor"));
    let folder = tempfile::tempdir().unwrap();
    let ec = ec_shm::Settings { folder: folder.path().join("ec"), bytes_max: 1000, ..Default::default() };
    let hand_off = ec_shm::EcShm::new(model(), ec_shm::EcStore::open(ec, EngineState::Quiet).unwrap());
    let (part, lease) = hand_off.part(&image).unwrap();
    assert_eq!(serde_json::from_slice::<Value>(&part).unwrap(), golden("tensor_in_ec_file"));
    let file = folder.path().join("ec").join("5a".repeat(32)).join("encoder_cache.safetensors");
    assert_eq!(std::fs::read(file).unwrap(), vectors("formats/encoder_cache.safetensors"));
    assert!(lease.holds() && hand_off.store().stats().leases == 1);
    drop(lease);
    assert_eq!(hand_off.store().stats().leases, 0);
}

#[test]
fn other_engines_get_their_own_parts() {
    let archive = base64_simd::STANDARD.encode_to_string(vectors("formats/embeds_6x8_bf16.pt"));
    let prompt = PromptEmbeds::new(EngineTensor { merge: None, ..model() });
    assert_eq!(part_of(&prompt, &image(&model())), json!({"type": "prompt_embeds", "data": archive}));
    let trt = TrtImageEmbeds::new(model());
    assert_eq!(part_of(&trt, &image(&model())), json!({"type": "image_embeds", "image_embeds": {"data": archive}}));
    let sglang = sglang_epd::SglangEpd::new(model());
    let (part, lease) = sglang.part(&image(&model())).unwrap();
    let (_, second) = sglang.part(&image(&model())).unwrap();
    let url = format!("{}{}", sglang_epd::SCHEME, "5a".repeat(32));
    let wanted = json!({"type": "image_url", "image_url": {"url": url}});
    assert_eq!(serde_json::from_slice::<Value>(&part).unwrap(), wanted);
    drop(lease);
    assert!(sglang.find(&url).is_some() && sglang.find("fovea-embedding:00").is_none());
    drop(second);
    assert!(sglang.find(&url).is_none());
}

#[test]
fn a_model_without_grids_gets_a_bare_tensor_and_float16_goes_as_npy() {
    let model = EngineTensor { merge: None, ..model() };
    let data: Bytes = vectors("formats/embeds_6x8_f16.npy")[128..].to_vec().into();
    let embedding = Embedding { rows: 6, width: 8, dtype: DType::F16, data, grid_thw: None };
    let embedding = Arc::new(check(embedding, &model.expect(None)).unwrap());
    let part = part_of(&ImageEmbeds::new(model), &EncodedImage { id: MediaId([1; 32]), embedding });
    let npy = base64_simd::STANDARD.encode_to_string(vectors("formats/embeds_6x8_f16.npy"));
    assert_eq!(part["image_embeds"], json!(npy));
}

#[test]
fn an_embedding_checked_for_another_model_is_not_handed_off() {
    let deepstack = EngineTensor { levels: 2, ..model() };
    let error = ImageEmbeds::new(deepstack).part(&image(&model())).unwrap_err();
    assert!(matches!(error, HandOffError::Unfit(CheckError::Width { found: 8, wanted: 24 })), "{error}");
    assert_eq!(error.status(), 500);
}

#[test]
fn block_keys_are_those_in_the_engines_events() {
    let golden: Value = serde_json::from_slice(&vectors("prompt_embeds.json")).unwrap();
    let number = |name: &str| golden[name].as_u64().unwrap() as u32;
    let data = base64_simd::STANDARD.decode_to_vec(golden["rows_base64"].as_str().unwrap()).unwrap();
    let (width, dtype) = (number("width"), DType::Bf16);
    let rows = Embedding { rows: number("rows"), width, dtype, data: data.into(), grid_thw: None };
    let placed = [Placed { start: number("start"), rows: &rows }];
    let keys = |placed: &[Placed<'_>], prompt| block_keys(placed, width, dtype, number("block_tokens"), prompt);
    let hex = |keys: Option<Vec<[u8; 32]>>| -> Vec<String> {
        keys.unwrap().iter().map(|key| MediaId(*key).to_string()).collect()
    };
    let found = hex(keys(&placed, number("prompt_tokens")));
    assert_eq!(json!(found), golden["keys"]);
    // 32 rows of 64 zero bytes: the key of a block of text alone.
    let text = "e5a00aa9991ac8a5ee3109844d84a55583bd20572ad3ffcd42792f3c36b183ad";
    assert_eq!(hex(keys(&placed, 160))[2..], [text, text, text]);
    assert_eq!(keys(&placed, 54), None, "beyond the prompt");
    assert_eq!(keys(&[placed[0], placed[0]], 91), None, "overlapping");
}

const EC: &str = r#"{"ec_connector":"ECExampleConnector","ec_role":"ec_consumer","ec_connector_extra_config":{"shared_storage_path":"FOLDER"}}"#;

#[track_caller]
fn check_choice(kind: EngineKind, version: &str, model: &EngineTensor, line: &str, mode: Mode, wanted: &str) {
    let folder = tempfile::tempdir().unwrap();
    let path: PathBuf = folder.path().join("ec");
    let json = EC.replace("FOLDER", path.to_str().unwrap());
    let arguments: Vec<String> = line.split_whitespace().map(|word| word.replace("@EC", &json)).collect();
    let command_line = CommandLine::parse(&arguments);
    let engine = Engine { kind, version, model, command_line: Some(&command_line), state: EngineState::Quiet };
    let ec = ec_shm::Settings { folder: path, bytes_max: 1000, ..Default::default() };
    let said = choose(&engine, mode, ec).map_or_else(|error| error.to_string(), |hand_off| hand_off.name().to_owned());
    assert!(said.starts_with(wanted), "{said}");
}

#[test]
fn the_cheapest_hand_off_that_the_engine_was_started_for_is_chosen() {
    use EngineKind::{Sglang, TrtLlm, Vllm};
    let (vision, text) = (model(), EngineTensor { vision: false, merge: None, ..model() });
    let ec = "--ec-transfer-config @EC";
    check_choice(Vllm, "0.32.0", &vision, ec, Mode::Auto, "vllm-ec-shm");
    check_choice(Vllm, "0.33.0", &vision, "--enable_mm_embeds", Mode::Auto, "vllm-image-embeds");
    check_choice(
        Vllm,
        "0.32.0",
        &vision,
        "serve --port 1",
        Mode::Auto,
        "no hand-off fits this engine as it was started: start vLLM with",
    );
    check_choice(Vllm, "0.32.0", &text, "--enable-prompt-embeds", Mode::Auto, "vllm-prompt-embeds");
    check_choice(Vllm, "0.32.0", &text, "", Mode::Auto, "engine was started without --enable-prompt-embeds");
    check_choice(Vllm, "0.31.9", &vision, ec, Mode::EcShm, "hand-off vllm-ec-shm needs vLLM 0.32 or newer");
    check_choice(
        Vllm,
        "0.32.0",
        &vision,
        ec,
        Mode::SglangEpd,
        "hand-off sglang-epd is for SGLang, this engine is vLLM",
    );
    let deepstack = EngineTensor { levels: 3, ..model() };
    check_choice(
        Vllm,
        "0.32.0",
        &deepstack,
        "--enable-prompt-embeds",
        Mode::PromptEmbeds,
        "hand-off vllm-prompt-embeds needs a model without deepstack",
    );
    check_choice(
        Vllm,
        "0.32.0",
        &vision,
        "--enable-mm-embeds --no-enable-mm-embeds",
        Mode::ImageEmbeds,
        "engine was started without --enable-mm-embeds",
    );
    check_choice(
        Vllm,
        "0.32.0",
        &vision,
        r#"--ec-transfer-config={"ec_connector":"ECCPUConnector"}"#,
        Mode::EcShm,
        "engine's --ec-transfer-config has /ec_connector ECCPUConnector, wanted ECExampleConnector",
    );
    check_choice(Vllm, "0.32.0", &vision, "", Mode::EcShm, "engine was started without --ec-transfer-config '{");
    let epd = "--language-only --encoder-transfer-backend zmq_to_scheduler";
    check_choice(Sglang, "0.5.23", &vision, epd, Mode::Auto, "sglang-epd");
    check_choice(Sglang, "0.5.22", &vision, epd, Mode::Auto, "hand-off sglang-epd needs SGLang 0.5.23");
    check_choice(
        Sglang,
        "0.5.23",
        &vision,
        "--language-only",
        Mode::Auto,
        "engine was started without --encoder-transfer-backend 'zmq_to_scheduler'",
    );
    check_choice(TrtLlm, "1.2.0", &vision, "", Mode::Auto, "trtllm-image-embeds");
}

#[test]
fn a_small_file_system_is_a_start_error() {
    let folder = tempfile::tempdir().unwrap();
    let (model, path) = (model(), folder.path().join("ec"));
    let engine = Engine {
        kind: EngineKind::Vllm,
        version: "0.32.0",
        model: &model,
        command_line: None,
        state: EngineState::Quiet,
    };
    let error =
        choose(&engine, Mode::EcShm, ec_shm::Settings { folder: path, bytes_max: u64::MAX / 2, ..Default::default() })
            .unwrap_err();
    assert!(matches!(error, ChooseError::Open(ec_shm::OpenError::Space { .. })), "{error}");
}

#[test]
fn a_probe_tells_a_missing_flag_from_a_bad_tensor() {
    let requirement = ImageEmbeds::new(model()).requirements().remove(0);
    let probe = requirement.probe.unwrap();
    assert!(serde_json::from_str::<Value>(probe.body).is_ok());
    let missing = br#"{"error":{"message":"You must set `--enable-mm-embeds` to input `image_embeds`","code":400}}"#;
    assert_eq!(probe.verdict(400, missing), Verdict::Missing);
    assert_eq!(probe.verdict(400, br#"{"error":{"message":"cannot load"}}"#), Verdict::Set);
    assert_eq!(probe.verdict(503, b"starting"), Verdict::Unknown);
    let line = CommandLine::parse(&["--no-enable-mm-embeds", "--enable-mm-embeds"]);
    assert_eq!(line.check(&ImageEmbeds::new(model()).requirements()), Ok(()));
    let line = CommandLine::parse(&["--enable-mm-embed"]);
    assert!(matches!(line.check(&ImageEmbeds::new(model()).requirements()), Err(StartError::Missing { .. })));
}
