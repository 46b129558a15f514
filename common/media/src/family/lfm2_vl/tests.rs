use fovea_kv::{MediaId, RoutingView};
use serde_json::{Value, json};

use crate::expand::{Item, expand};
use crate::family::{ConfigError, ModelFiles, VisionModel};

const IMAGE: u32 = 7;
const START: u32 = 1;
const END: u32 = 2;
const OVERVIEW: u32 = 3;

/// Texts in angle brackets are tokens: tiles are 1000 + 100 × row + column.
fn encode(text: &str) -> Option<Vec<u32>> {
    let token = |text: &str| match text {
        "<image" => Some(IMAGE),
        "<|image_start|" => Some(START),
        "<|image_end|" => Some(END),
        "<|img_thumbnail|" => Some(OVERVIEW),
        tile => {
            let (row, column) = tile.strip_prefix("<|img_row_")?.strip_suffix('|')?.split_once("_col_")?;
            Some(1000 + 100 * row.parse::<u32>().ok()? + column.parse::<u32>().ok()?)
        }
    };
    text.split_terminator('>').map(token).collect()
}

fn load(preprocessor: Value) -> Result<VisionModel, ConfigError> {
    let config = json!({ "model_type": "lfm2_vl", "image_token_id": IMAGE });
    let files = ModelFiles { config: &config, preprocessor: Some(&preprocessor), processor: None, kwargs: None };
    VisionModel::from_files(&files, encode)
}

/// By the functions of transformers 5.19.0 `image_processing_lfm2_vl.py`, run on their own: width, height, columns and rows of tiles,
/// tokens of the whole image.
const ROWS: [(u32, u32, u32, u32, u32); 91] = [
    (1, 33, 0, 0, 92),
    (1, 100, 0, 0, 80),
    (1, 768, 0, 0, 222),
    (1, 2000, 0, 0, 358),
    (2, 2, 0, 0, 64),
    (2, 640, 0, 0, 144),
    (2, 720, 0, 0, 152),
    (13, 1024, 0, 0, 72),
    (13, 1920, 0, 0, 98),
    (13, 4000, 0, 0, 125),
    (31, 31, 0, 0, 64),
    (31, 33, 0, 0, 72),
    (31, 640, 0, 0, 74),
    (31, 768, 0, 0, 80),
    (31, 1500, 0, 0, 112),
    (31, 1920, 0, 0, 126),
    (32, 1024, 0, 0, 92),
    (32, 1920, 0, 0, 124),
    (32, 4000, 0, 0, 125),
    (33, 100, 0, 0, 70),
    (33, 200, 0, 0, 80),
    (33, 2000, 0, 0, 126),
    (100, 200, 0, 0, 72),
    (100, 1500, 0, 0, 141),
    (200, 100, 0, 0, 72),
    (200, 768, 0, 0, 144),
    (200, 1000, 0, 0, 186),
    (256, 200, 0, 0, 80),
    (256, 500, 0, 0, 128),
    (256, 1080, 0, 0, 224),
    (362, 1024, 0, 0, 234),
    (362, 1920, 1, 5, 216),
    (400, 31, 0, 0, 87),
    (400, 32, 0, 0, 87),
    (400, 33, 0, 0, 84),
    (400, 100, 0, 0, 64),
    (400, 200, 0, 0, 72),
    (400, 400, 0, 0, 144),
    (400, 1920, 1, 5, 245),
    (500, 1, 0, 0, 179),
    (500, 1080, 1, 2, 230),
    (512, 32, 0, 0, 64),
    (512, 512, 0, 0, 256),
    (512, 720, 0, 0, 234),
    (512, 768, 0, 0, 247),
    (512, 1024, 0, 0, 242),
    (512, 1080, 1, 2, 253),
    (512, 1500, 1, 3, 243),
    (512, 3000, 1, 6, 228),
    (640, 1, 0, 0, 203),
    (640, 200, 0, 0, 120),
    (640, 500, 0, 0, 252),
    (640, 720, 0, 0, 240),
    (720, 32, 0, 0, 76),
    (720, 1024, 2, 3, 247),
    (720, 1080, 2, 3, 247),
    (768, 768, 2, 2, 256),
    (768, 3000, 1, 4, 248),
    (1024, 200, 0, 0, 192),
    (1024, 256, 0, 0, 256),
    (1024, 720, 3, 2, 247),
    (1024, 4000, 1, 4, 248),
    (1080, 13, 0, 0, 73),
    (1080, 33, 0, 0, 92),
    (1080, 1500, 2, 3, 234),
    (1500, 200, 0, 0, 215),
    (1500, 362, 4, 1, 224),
    (1500, 1080, 3, 2, 234),
    (1920, 31, 0, 0, 126),
    (1920, 720, 5, 2, 234),
    (1920, 1000, 4, 2, 242),
    (1920, 1024, 4, 2, 231),
    (2000, 31, 0, 0, 65),
    (2000, 500, 4, 1, 256),
    (3000, 13, 0, 0, 94),
    (3000, 400, 8, 1, 215),
    (3000, 1024, 3, 1, 243),
    (3000, 1920, 3, 2, 240),
    (3000, 4000, 2, 3, 234),
    (4000, 33, 0, 0, 125),
    (4000, 1080, 4, 1, 240),
    (4000, 1500, 5, 2, 234),
    (4000, 1920, 4, 2, 253),
    (1, 2000, 0, 0, 358),
    (2000, 1, 0, 0, 358),
    (1024, 1024, 2, 2, 256),
    (640, 480, 0, 0, 234),
    (1920, 1080, 4, 2, 252),
    (724, 724, 2, 2, 256),
    (736, 736, 2, 2, 256),
    (3840, 2160, 4, 2, 252),
];

#[test]
fn tiles_and_overview_are_those_of_the_processor() {
    let model = load(json!({})).unwrap();
    for (width, height, columns, rows, overview) in ROWS {
        let wanted = 256 * columns * rows + overview;
        assert_eq!(model.image_tokens(width, height), Ok(wanted), "{width}x{height}");
    }
}

#[test]
fn every_tile_is_marked_with_its_place() {
    let model = load(json!({})).unwrap();
    let view = |width, height| {
        let shape = model.measure(width, height).unwrap();
        let expansion = expand(&[9, IMAGE, 9], &[Item { id: MediaId([1; 32]), shape }], &model).unwrap();
        let runs = |view: &RoutingView| view.runs().iter().map(|run| (run.token, run.count)).collect::<Vec<_>>();
        runs(&expansion.view)
    };
    let small = view(512, 512);
    assert_eq!(small, [(9, 1), (START, 1), (IMAGE, 256), (END, 1), (9, 1)]);
    let tile = |place| [(place, 1), (IMAGE, 256)];
    let tiles: Vec<_> = [1101, 1102, 1103, 1201, 1202, 1203].into_iter().flat_map(tile).collect();
    let wanted = [&[(9, 1), (START, 1)][..], &tiles, &[(OVERVIEW, 1), (IMAGE, 247), (END, 1), (9, 1)]].concat();
    let large = view(1536, 1024);
    assert_eq!(large[..14], wanted[..14]);
    assert_eq!((large[14], large[16]), ((OVERVIEW, 1), (END, 1)));
}

#[test]
fn what_vllm_and_the_processor_see_differently_is_an_error() {
    assert!(load(json!({ "use_thumbnail": false })).is_err());
    assert!(load(json!({ "min_tiles": 1 })).is_err());
    assert!(load(json!({ "max_tiles": 65 })).is_err());
    let single = load(json!({ "min_tiles": 1, "max_tiles": 1 })).unwrap();
    assert!(single.image_tokens(4000, 3000).unwrap() <= 256);
}
