//! Messages of the block stream. Heads are postcard records, hashes follow them as raw little-endian u64 arrays.
//!
//! **Invariant:** a receiver ignores nothing silently: an unknown message kind or a later major version ends the stream with an error
//! that names it.

use fovea_kv::sums::{BUCKETS, Sums};
use fovea_kv::{MediaId, MediaKey, SequenceHash, Tier};
use serde::{Deserialize, Serialize};

/// Version that this build speaks. Equal majors understand each other; minors only add fields at the end and message kinds.
pub const PROTOCOL: Version = Version { major: 1, minor: 2 };

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Version {
    pub major: u16,
    pub minor: u16,
}

impl Version {
    /// May [`FromSidecar::Learnt`] be sent to a balancer whose welcome says this?
    pub fn takes_learnt(self) -> bool {
        self.minor >= 1
    }

    /// May [`FromSidecar::Digest`] and [`FromSidecar::Embeddings`] be sent to a balancer whose welcome says this?
    pub fn takes_digests(self) -> bool {
        self.minor >= 2
    }
}

/// Sidecar → balancer.
#[derive(Clone, Debug, PartialEq)]
pub enum FromSidecar {
    /// First on every stream; again whenever a fact in it changes. Replaces the one before.
    Hello(Hello),
    /// A piece of everything that one worker publishes at watermark `seq`.
    Snapshot(Snapshot),
    /// Difference between two published sets of one worker.
    Delta(Delta),
    Load(Load),
    /// Facts that the sidecar saw its engine use. In any order and as often as one likes: the last about a key counts.
    /// Only to balancers that take it ([`Version::takes_learnt`]).
    Learnt(Vec<Learnt>),
    /// Sums of what one worker publishes at `seq`. Only to balancers that take it ([`Version::takes_digests`]).
    Digest(Digest),
    /// The same by bucket, when asked for.
    Buckets(Buckets),
    /// Begins a repair, when asked for: snapshot frames of the same worker, epoch and seq follow, none of them `first`.
    Repair(Repair),
    /// Whose encoder output the sidecar keeps. Only to balancers that take it ([`Version::takes_digests`]).
    Embeddings(Embeddings),
    /// Nothing to say, still here.
    Heartbeat,
}

/// Balancer → sidecar.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FromBalancer {
    /// Answer to the first `Hello`.
    Welcome(Version),
    /// Everything of this worker up to `seq` is applied.
    Ack { worker: u16, epoch: u64, seq: u64 },
    /// What came does not fit what is held: send a snapshot of this worker.
    Resync { worker: u16 },
    /// A digest differs: send sums by bucket. Only to sidecars that sent one.
    AskBuckets { worker: u16 },
    /// These buckets differ, by level: send what is in them.
    AskRepair { worker: u16, buckets: [BucketMask; 3] },
}

/// Bit `i % 8` of byte `i / 8` stands for bucket i ([`fovea_kv::sums::bucket`]).
pub type BucketMask = [u8; BUCKETS / 8];

/// All that a balancer must know to predict what the engine caches. Read by the codec alone: what it holds depends on the protocol's minor.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Hello {
    pub protocol: Version,
    /// Base URL at which the sidecar takes requests, e.g. `http://10.0.0.7:8000`.
    pub advertised_url: String,
    pub engine: EngineFacts,
    /// One per data-parallel rank; `workers[i]` is worker index i of the other messages.
    pub workers: Vec<WorkerFacts>,
    /// The engine takes no new requests: draining, loading or dead.
    pub draining: bool,
    /// False = what the engine cached of media was not what was predicted, again and again: use text prefixes only.
    /// True in hellos of protocol 1.0, which do not say it.
    pub media_trusted: bool,
    /// Of the sidecar's own encoder, if it has one: its outputs are equal where this is. `None` before protocol 1.2, too.
    pub encoder_fingerprint: Option<[u8; 32]>,
}

/// Facts of the engine process. Workers with equal facts (names apart) form one pool.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EngineFacts {
    pub kind: EngineKind,
    pub version: String,
    /// The model string as the engine was started with: it enters vLLM's default image identity.
    pub engine_model: String,
    /// Names under which the base model is served.
    pub served_names: Vec<String>,
    /// LoRA adapters loaded at this moment.
    pub lora_names: Vec<String>,
    /// Longest sequence in tokens; 0 = unknown.
    pub max_model_len: u32,
    /// Images are transposed by EXIF orientation before they are measured (vLLM yes, SGLang no).
    pub exif: bool,
    pub hash_scheme: HashScheme,
    /// KV groups other than full attention exist: prefix depth is an upper bound.
    pub hybrid: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum EngineKind {
    Vllm,
    Sglang,
    TrtLlm,
}

/// How sequence hashes are made; different schemes never share a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum HashScheme {
    /// xxh3 over tokens and media spans, root `fovea1`, one engine block per routing block.
    Fovea1,
    /// The same over pairs of neighbouring tokens, one position fewer than the prompt has, no spans (SGLang with EAGLE).
    Fovea1Pairs,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerFacts {
    pub dp_rank: u32,
    /// Tokens per KV block; 0 = not known yet (no event and no metric seen).
    pub block_size: u32,
    /// KV capacity in blocks; 0 = unknown.
    pub capacity_blocks: u64,
    /// The event stream is connected and complete: overlap may be trusted.
    pub events: bool,
}

/// Chunk of a snapshot. `first` voids all that was held for the worker, `last` makes the new set live.
#[derive(Clone, Debug, PartialEq)]
pub struct Snapshot {
    pub worker: u16,
    /// Life of the engine process, made by the sidecar; a new one voids what was known.
    pub epoch: u64,
    /// Watermark: the next delta of this worker has `seq + 1`.
    pub seq: u64,
    /// Level of these hashes: the closure up to and including this tier.
    pub level: Tier,
    pub first: bool,
    pub last: bool,
    pub hashes: Vec<SequenceHash>,
}

/// Removals are applied first, children before parents; then stores, parents before children. Level by level.
#[derive(Clone, Debug, PartialEq)]
pub struct Delta {
    pub worker: u16,
    pub epoch: u64,
    pub seq: u64,
    pub levels: [LevelDelta; 3],
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LevelDelta {
    pub removed: Vec<SequenceHash>,
    pub stored: Vec<SequenceHash>,
}

/// The sidecar's view of one worker's load. The sidecar is the truth: every request passes it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Load {
    pub worker: u16,
    /// Requests whose first byte has been seen and whose last has not.
    pub running: u32,
    /// Requests without a first byte.
    pub waiting: u32,
    /// Prompt tokens of waiting requests that no cache covers.
    pub prefill_tokens: u64,
    /// Prompt tokens of running requests: what decoding reads at each step.
    pub decode_tokens: u64,
    /// KV pool in use by running requests, 0..=1000; as the engine's metrics say, 0 when unknown.
    pub kv_usage_permille: u16,
}

/// One thing that an engine was seen to use for a media item.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Learnt {
    pub key: MediaKey,
    /// Positions that the item fills in the prompt; 0 = not seen.
    pub tokens: u32,
    pub value: LearntValue,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LearntValue {
    /// Identity in the engine's block keys (vLLM, TensorRT-LLM).
    Id(MediaId),
    /// Canonical tokens that fill the item's positions in turn, each item from the first (SGLang): 1 or 4.
    Pads(Vec<u32>),
    /// Forget this key: what was learnt about it contradicted itself.
    Nothing,
}

/// Count and sum of what one worker publishes in each level, as its deltas up to `seq` leave it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Digest {
    pub worker: u16,
    pub epoch: u64,
    pub seq: u64,
    pub levels: [Sums; 3],
}

/// Sum mod 2⁶⁴ of each bucket, by level.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Buckets {
    pub worker: u16,
    pub epoch: u64,
    pub seq: u64,
    pub levels: Box<[[u64; BUCKETS]; 3]>,
}

/// What the balancer holds in these buckets is to be replaced by what follows; the other buckets stay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Repair {
    pub worker: u16,
    pub epoch: u64,
    pub seq: u64,
    pub buckets: [BucketMask; 3],
}

/// Media items, by the first eight bytes of their `MediaId` as a little-endian number, whose encoder output came or went.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Embeddings {
    /// Everything told before is void.
    pub first: bool,
    pub stored: Vec<u64>,
    pub removed: Vec<u64>,
}
