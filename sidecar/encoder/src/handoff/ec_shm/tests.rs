use std::fs;
use std::sync::Arc;

use bytes::Bytes;
use fovea_kv::MediaId;

use super::files::{self, FILE};
use super::*;
use crate::tensor::{DType, Embedding};

fn id(number: u8) -> MediaId {
    MediaId([number; 32])
}

/// 96 bytes of rows; 176 with the header.
fn rows(value: u8) -> Embedding {
    Embedding { rows: 6, width: 8, dtype: DType::Bf16, data: Bytes::from(vec![value; 96]), grid_thw: Some([1, 4, 6]) }
}

struct Folder(tempfile::TempDir);

impl Folder {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn path(&self) -> PathBuf {
        self.0.path().join("ec")
    }

    fn open(&self, bytes_max: u64, engine: EngineState) -> EcStore {
        EcStore::open(Settings { folder: self.path(), bytes_max, ..Settings::default() }, engine).unwrap()
    }

    fn file(&self, number: u8) -> PathBuf {
        self.path().join(id(number).to_string()).join(FILE)
    }

    /// Names in the folder.
    fn names(&self) -> usize {
        fs::read_dir(self.path()).unwrap().count()
    }
}

#[test]
fn a_file_is_whole_and_held_by_all_who_share_it() {
    let folder = Folder::new();
    let store = folder.open(1000, EngineState::Quiet);
    let first = store.put(&id(1), &rows(1)).unwrap();
    let second = store.put(&id(1), &rows(1)).unwrap();
    let bytes = fs::read(folder.file(1)).unwrap();
    assert_eq!((bytes.len(), &bytes[80..]), (176, &[1; 96][..]));
    assert_eq!(store.stats(), EcStats { files: 1, bytes: 176, leases: 2, written: 1, reused: 1, ..EcStats::default() });
    drop(first);
    assert_eq!((store.stats().leases, store.engine_quiet().unwrap()), (1, 0), "still held");
    drop(second);
    assert!(folder.file(1).exists(), "kept for the next request");
    assert_eq!(store.engine_quiet().unwrap(), 1);
    assert_eq!((folder.names(), store.stats().bytes), (0, 0), "file and folder go");
}

#[test]
fn room_is_made_of_files_that_nobody_holds_oldest_first() {
    let folder = Folder::new();
    let store = folder.open(3 * 176, EngineState::Quiet);
    let held = store.put(&id(1), &rows(1)).unwrap();
    drop(store.put(&id(2), &rows(2)).unwrap());
    drop(store.put(&id(3), &rows(3)).unwrap());
    drop(store.put(&id(2), &rows(2)).unwrap());
    let fourth = store.put(&id(4), &rows(4)).unwrap();
    assert!(folder.file(1).exists() && folder.file(2).exists() && !folder.file(3).exists());
    let fifth = store.put(&id(5), &rows(5)).unwrap();
    assert!(!folder.file(2).exists());
    let full = store.put(&id(6), &rows(6)).unwrap_err();
    assert_eq!(full.status(), 503);
    assert!(matches!(full, HandOffError::Full { needed: 176, free: 0, budget: 528 }), "{full}");
    assert_eq!((store.stats().evicted, store.stats().refused), (2, 1));
    drop((held, fourth, fifth));
    drop(store.put(&id(6), &rows(6)).unwrap());
}

#[test]
fn what_an_earlier_life_left_stays_until_the_engine_is_quiet() {
    let folder = Folder::new();
    let crashed = folder.open(1000, EngineState::Quiet);
    std::mem::forget(crashed.put(&id(1), &rows(1)).unwrap());
    fs::write(folder.file(1).with_file_name(format!("{FILE}.0123")), b"half").unwrap();
    fs::create_dir(folder.path().join("0123456789abcdef")).unwrap();
    fs::create_dir(folder.path().join("not ours")).unwrap();
    let store = folder.open(1000, EngineState::Unknown);
    assert_eq!((store.stats().files, store.stats().bytes), (1, 176));
    // Its content is not trusted: the first use writes it anew.
    drop(store.put(&id(1), &rows(7)).unwrap());
    assert_eq!(fs::read(folder.file(1)).unwrap()[80..], [7; 96]);
    assert_eq!(store.engine_quiet().unwrap(), 1);
    assert_eq!(folder.names(), 1, "only the folder that is not ours is left");
    let wiped = folder.open(1000, EngineState::Quiet);
    assert_eq!(wiped.stats(), EcStats::default());
}

#[test]
fn a_file_that_vanished_is_written_again_even_while_held() {
    let folder = Folder::new();
    let store = folder.open(1000, EngineState::Quiet);
    let first = store.put(&id(1), &rows(1)).unwrap();
    fs::remove_dir_all(folder.path().join(id(1).to_string())).unwrap();
    let second = store.put(&id(1), &rows(1)).unwrap();
    assert!(folder.file(1).exists());
    assert_eq!((store.stats().leases, store.stats().written, store.stats().bytes), (2, 2, 176));
    drop((first, second));
    assert_eq!(store.stats().leases, 0);
}

#[test]
fn a_vanished_file_without_room_stays_counted_for_those_who_hold_it() {
    let folder = Folder::new();
    let store = folder.open(2 * 176, EngineState::Quiet);
    let first = store.put(&id(1), &rows(1)).unwrap();
    let other = store.put(&id(2), &rows(2)).unwrap();
    fs::remove_dir_all(folder.path().join(id(1).to_string())).unwrap();
    // The same image, larger than it was: a length that does not fit is as good as no file.
    let large = Embedding { rows: 12, data: Bytes::from(vec![1; 192]), ..rows(1) };
    assert_eq!(store.put(&id(1), &large).unwrap_err().status(), 503);
    let second = store.put(&id(1), &rows(1)).unwrap();
    drop(first);
    assert!(folder.file(1).exists() && store.put(&id(3), &rows(3)).is_err(), "the second still holds it");
    drop((second, other));
    assert_eq!((store.stats().leases, store.stats().bytes), (0, 352));
}

#[test]
fn a_write_that_fails_leaves_no_count_behind() {
    let folder = Folder::new();
    let store = folder.open(1000, EngineState::Quiet);
    // A file where the image's folder should be.
    fs::write(folder.path().join(id(1).to_string()), b"").unwrap();
    let error = store.put(&id(1), &rows(1)).unwrap_err();
    assert!(matches!(error, HandOffError::Io { .. }), "{error}");
    assert_eq!((store.stats().bytes, store.stats().files, store.stats().leases), (0, 0, 0));
}

#[test]
fn unsafe_and_small_places_are_refused_at_start() {
    let folder = Folder::new();
    let open = |folder: PathBuf, bytes_max| {
        EcStore::open(Settings { folder, bytes_max, ..Settings::default() }, EngineState::Quiet).unwrap_err()
    };
    assert!(matches!(open(folder.path(), u64::MAX), OpenError::Space { .. }));
    assert!(matches!(open("relative/path".into(), 1), OpenError::Path { .. }));
    assert!(matches!(open("/dev".into(), 1), OpenError::Path { .. }));
    let link = folder.0.path().join("link");
    std::os::unix::fs::symlink(folder.path(), &link).unwrap();
    assert!(matches!(open(link, 1), OpenError::NoFolder { .. }));
}

#[test]
fn many_requests_for_few_images_never_see_half_a_file() {
    let folder = Folder::new();
    // Room for three of five images, and four threads that hold one each: now and then there is none.
    let store = Arc::new(folder.open(3 * 176, EngineState::Quiet));
    std::thread::scope(|scope| {
        for thread in 0..4_u64 {
            let (store, folder) = (Arc::clone(&store), &folder);
            scope.spawn(move || {
                let mut seed = thread.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
                for _ in 0..400 {
                    seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    let number = (seed >> 40) as u8 % 5;
                    match store.put(&id(number), &rows(number)) {
                        Ok(lease) => {
                            assert_eq!(fs::read(folder.file(number)).unwrap()[80..], [number; 96], "thread {thread}");
                            drop(lease);
                        }
                        Err(error) => assert_eq!(error.status(), 503, "{error}"),
                    }
                }
            });
        }
    });
    let stats = store.stats();
    assert!(stats.bytes <= 528 && stats.leases == 0 && stats.files <= 3, "{stats:?}");
    assert_eq!(folder.names() as u64, stats.files);
}

#[test]
fn names_are_made_of_our_digits_alone() {
    let path = files::path_of(std::path::Path::new("/dev/shm/ec"), &MediaId::from_engine_id("../../etc/x"));
    let name = path.parent().unwrap().file_name().unwrap().to_str().unwrap();
    assert!(name.len() == 64 && name.bytes().all(|byte| byte.is_ascii_hexdigit()), "{name}");
}

#[test]
fn files_of_a_life_before_make_room_after_their_time() {
    let folder = Folder::new();
    for number in 1..=5 {
        drop(folder.open(1000, EngineState::Unknown).put(&id(number), &rows(1)).unwrap());
    }
    let open = |foreign_keep| {
        EcStore::open(Settings { folder: folder.path(), bytes_max: 1000, foreign_keep }, EngineState::Unknown).unwrap()
    };
    let early = open(Duration::from_secs(60));
    assert!(matches!(early.put(&id(9), &rows(1)), Err(HandOffError::Full { .. })), "they may be read");
    let late = open(Duration::ZERO);
    let lease = late.put(&id(9), &rows(1)).unwrap();
    assert!(folder.file(9).exists() && !folder.file(1).exists());
    assert_eq!((late.stats().files, late.stats().bytes), (1, 176));
    drop(lease);
}
