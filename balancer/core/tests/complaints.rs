//! Complaints about load (docs/operate/complaints.md), each as a small simulation over choice and bookings alone.

use std::collections::VecDeque;

use fovea_balancer_core::choose::{Candidate, Query, Settings, choose};
use fovea_balancer_core::fleet::WorkerKey;
use fovea_balancer_core::load::{BookingId, Charge, Report, WorkerLoad};

const BLOCK_TOKENS: u32 = 16;

/// What one balancer knows: a load for each worker, and the leading blocks of the next prompt that each holds.
struct View {
    loads: Vec<WorkerLoad>,
    held_blocks: Vec<u32>,
    turn: u64,
}

impl View {
    fn new(workers: usize) -> Self {
        let loads = (0..workers).map(|_| WorkerLoad::default()).collect();
        Self { loads, held_blocks: vec![0; workers], turn: 0 }
    }

    /// Chooses a worker for a prompt of this length and books the request there.
    fn route(&mut self, prompt_tokens: u32, media: Option<u64>) -> (usize, BookingId, u64) {
        let known = self.loads.iter().zip(&self.held_blocks).enumerate();
        let candidates: Vec<_> = known
            .map(|(at, (load, &held))| Candidate {
                key: WorkerKey(at as u64),
                affinity: at as u64,
                overlap_blocks: [held; 3],
                embedded: 0,
                waiting_tokens: load.waiting_tokens(),
                decode_tokens: load.decode_tokens(),
            })
            .collect();
        let query = Query { prompt_tokens, block_tokens: BLOCK_TOKENS, media, turn: self.turn, ..Query::default() };
        self.turn += 1;
        let why = choose(&candidates, &query, &Settings::default(), &mut Vec::new()).expect("a worker");
        let prefill_tokens = u64::from(prompt_tokens - why.reused_tokens);
        let charge = Charge { prefill_tokens, prompt_tokens: prompt_tokens.into(), ..Charge::default() };
        let at = usize::try_from(why.key.0).expect("an index");
        (at, self.loads[at].book(charge, [].into()), prefill_tokens)
    }
}

/// Questions of 50 tokens behind the 128 blocks of a system prompt, 50 a second, each answered for one second. Returns how many of the
/// last 2000 each worker got.
fn ask_behind_a_system_prompt(warm: usize) -> [u32; 8] {
    let mut view = View::new(8);
    view.held_blocks[..warm].fill(128);
    let mut running: VecDeque<(usize, BookingId)> = VecDeque::new();
    let mut sent = [0; 8];
    for request in 0..3000 {
        if running.len() == 50
            && let Some((at, id)) = running.pop_front()
        {
            view.loads[at].release(id);
        }
        let (at, id, _) = view.route(128 * BLOCK_TOKENS + 50, None);
        view.loads[at].started(id);
        view.held_blocks[at] = 128;
        running.push_back((at, id));
        sent[at] += u32::from(request >= 1000);
    }
    sent
}

/// LOD-01: all workers hold the prompt of the system.
#[test]
fn a_system_prompt_that_all_hold_spreads_evenly() {
    let sent = ask_behind_a_system_prompt(8);
    assert!(sent.iter().all(|sent| (188..=312).contains(sent)), "250 each within a quarter: {sent:?}");
}

/// LOD-01: one worker holds it at first. It is copied to as many as the load is worth, which need not be all.
#[test]
fn a_shared_system_prompt_does_not_draw_all_requests_to_one_worker() {
    let sent = ask_behind_a_system_prompt(1);
    let used = sent.iter().filter(|sent| **sent > 0).count();
    assert!(used >= 3 && sent.iter().all(|sent| *sent <= 700), "{sent:?}");
}

/// LOD-02: equal requests with one image reach four balancers before any of them hears of the others' choices.
#[test]
fn balancers_that_know_nothing_of_each_other_do_not_choose_one_worker_in_a_burst() {
    const WORKERS: usize = 8;
    let mut balancers: Vec<_> = (0..4).map(|_| View::new(WORKERS)).collect();
    let mut sent = [0_u32; WORKERS];
    for request in 0..64 {
        let (at, ..) = balancers[request % 4].route(900, Some(7));
        sent[at] += 1;
    }
    assert!(sent.iter().all(|&sent| sent <= 16), "twice the mean at most: {sent:?}");
}

/// LOD-02: what the others sent comes with the sidecars' reports and counts beside the own bookings.
#[test]
fn a_report_of_what_another_balancer_sent_turns_the_next_request_away() {
    let (mut one, mut other) = (View::new(2), View::new(2));
    let (first, _, prefill_tokens) = one.route(900, Some(7));
    other.loads[first].report(Report { waiting: 1, prefill_tokens, ..Report::default() });
    assert_ne!(other.route(900, Some(7)).0, first);
}

/// LOD-07: one worker is saturated with prompts of its own, another idle and full of a prompt that nobody asks for.
#[test]
fn a_miss_goes_to_the_idle_worker_whatever_the_others_hold() {
    let mut view = View::new(2);
    let charge = Charge { prefill_tokens: 4000, prompt_tokens: 4000, ..Charge::default() };
    view.loads[0].book(charge, [].into());
    for _ in 0..4 {
        assert_eq!(view.route(800, None).0, 1);
    }
    // Five times 800 are as much as waits at the first.
    view.route(800, None);
    assert_eq!(view.route(800, None).0, 0);
}

/// LOD-08: a request that was answered makes its worker neither heavier nor lighter than the others.
#[test]
fn equal_workers_share_requests_that_come_one_by_one() {
    let mut view = View::new(3);
    let mut sent = [0_u32; 3];
    for _ in 0..300 {
        let (at, id, _) = view.route(640, None);
        view.loads[at].started(id);
        view.loads[at].release(id);
        sent[at] += 1;
    }
    assert!(sent.iter().all(|sent| (80..=120).contains(sent)), "{sent:?}");
}
