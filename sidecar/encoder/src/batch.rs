//! Which images go into which forward pass, and which request they answer.
//!
//! Pure: no clock, thread, lock or socket; equal calls give equal batches. Mirrors the batching of Dynamo 1.6's custom encoder (eager drain,
//! input order, cost budget, first error wins) and adds a bound on the queue, results per image, and another try in smaller batches.
//! **Invariant:** every accepted request is answered exactly once, or cancelled.

mod limits;
#[cfg(test)]
mod simulation;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, HashMap, VecDeque};

use crate::error::{BatchError, EncodeError, ItemError};

pub use limits::{Limits, LimitsError};

/// One accepted request, in order of acceptance.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId(u64);

/// One image, ready for a forward pass.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Work<I> {
    pub item: I,
    /// In the encoder's unit; at least 1.
    pub cost: u32,
    /// Images of different keys never share a batch; keys take turns.
    pub key: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Slot {
    request: RequestId,
    index: usize,
    cost: u32,
    key: u64,
}

/// Images for one forward pass. Must come back through [`Batcher::finish`].
#[derive(Debug)]
#[must_use]
pub struct Batch<I> {
    slots: Vec<Slot>,
    items: Vec<I>,
    bucket: Option<u32>,
}

impl<I> Batch<I> {
    pub fn items(&self) -> &[I] {
        &self.items
    }

    /// Sum of the costs.
    pub fn cost(&self) -> u64 {
        self.slots.iter().map(|slot| u64::from(slot.cost)).sum()
    }

    /// Smallest of the encoder's buckets that holds the cost; `None` when there is none.
    pub fn bucket(&self) -> Option<u32> {
        self.bucket
    }

    /// Requests in the batch, each once for a run of its images.
    pub fn requests(&self) -> impl Iterator<Item = RequestId> + '_ {
        let mut last = None;
        self.slots.iter().map(|slot| slot.request).filter(move |&request| last.replace(request) != Some(request))
    }

    fn is_one_request(&self) -> bool {
        self.requests().count() <= 1
    }
}

/// A request's answer.
#[derive(Debug, PartialEq, Eq)]
pub struct Done<T> {
    pub request: RequestId,
    /// One per image, in the request's order.
    pub result: Result<Vec<T>, EncodeError>,
}

/// What a forward pass gave.
pub type Outcome<T> = Result<Vec<Result<T, ItemError>>, BatchError>;

struct Request<I, T> {
    /// Taken while in a forward pass.
    items: Vec<Option<I>>,
    results: Vec<Option<T>>,
    unfinished: usize,
    in_flight: usize,
    queued_cost: u64,
}

/// The queue of one encoder. Holds at most `max_queued_cost` of images, besides those in flight.
pub struct Batcher<I, T> {
    limits: Limits,
    next_id: u64,
    requests: HashMap<RequestId, Request<I, T>>,
    /// Keys with slots, in order of their turns. A slot whose request is gone is skipped.
    turns: VecDeque<u64>,
    queues: BTreeMap<u64, VecDeque<Slot>>,
    /// Parts of failed batches, before all else.
    retries: VecDeque<Vec<Slot>>,
    queued_cost: u64,
    slots: usize,
    live_slots: usize,
    closed: bool,
}

/// Stale slots kept before the queues are rebuilt without them: few enough to be nothing, many enough to be rare.
const STALE_MAX: usize = 1024;

impl<I, T> Batcher<I, T> {
    pub fn new(limits: Limits) -> Self {
        Self {
            limits,
            next_id: 0,
            requests: HashMap::new(),
            turns: VecDeque::new(),
            queues: BTreeMap::new(),
            retries: VecDeque::new(),
            queued_cost: 0,
            slots: 0,
            live_slots: 0,
            closed: false,
        }
    }

    /// Cost of all images that wait for a forward pass.
    pub fn queued_cost(&self) -> u64 {
        self.queued_cost
    }

    /// Nothing waits and nothing is in flight.
    pub fn is_idle(&self) -> bool {
        self.requests.is_empty()
    }

    /// Whether a full batch waits, so that waiting for more gains nothing.
    pub fn is_full(&self) -> bool {
        let cost = self.limits.max_batch_cost.is_some_and(|max| self.queued_cost >= max.get().into());
        let items = self.limits.max_batch_items.is_some_and(|max| self.live_slots >= max.get() as usize);
        !self.retries.is_empty() || cost || items
    }

    /// Queues all images of a request, or none. O(images).
    ///
    /// # Errors
    /// A cost of 0 is the encoder's fault; above what a batch or the queue holds, the client's; else the queue may be full or closed.
    pub fn submit(&mut self, work: Vec<Work<I>>) -> Result<RequestId, EncodeError> {
        if self.closed {
            return Err(EncodeError::Closed);
        }
        let cost = self.limits.check(work.iter().map(|work| work.cost))?;
        let max = self.limits.max_queued_cost;
        if self.queued_cost + cost > max {
            return Err(EncodeError::Busy { queued: self.queued_cost, max });
        }
        let request = RequestId(self.next_id);
        self.next_id += 1;
        self.queued_cost += cost;
        self.slots += work.len();
        self.live_slots += work.len();
        let mut items = Vec::with_capacity(work.len());
        for (index, Work { item, cost, key }) in work.into_iter().enumerate() {
            items.push(Some(item));
            let queue = self.queues.entry(key).or_default();
            if queue.is_empty() {
                self.turns.push_back(key);
            }
            queue.push_back(Slot { request, index, cost, key });
        }
        let results = items.iter().map(|_| None).collect();
        let unfinished = items.len();
        let entry = Request { items, results, unfinished, in_flight: 0, queued_cost: cost };
        self.requests.insert(request, entry);
        Ok(request)
    }

    /// Takes the next batch: parts of failed batches first, then images in order of arrival, keys in turn. A batch is closed by the
    /// first image that does not fit. Amortised O(images).
    pub fn next_batch(&mut self) -> Option<Batch<I>> {
        while let Some(mut part) = self.retries.pop_front() {
            self.slots -= part.len();
            part.retain(|slot| self.requests.contains_key(&slot.request));
            if !part.is_empty() {
                return Some(self.take(part));
            }
        }
        while let Some(key) = self.turns.pop_front() {
            let slots = self.fill(key);
            if self.queues.get(&key).is_some_and(|queue| !queue.is_empty()) {
                self.turns.push_back(key);
            } else {
                self.queues.remove(&key);
            }
            if !slots.is_empty() {
                return Some(self.take(slots));
            }
        }
        None
    }

    fn fill(&mut self, key: u64) -> Vec<Slot> {
        let (mut slots, mut cost) = (Vec::new(), 0);
        let Some(queue) = self.queues.get_mut(&key) else { return slots };
        while let Some(slot) = queue.front() {
            if self.requests.contains_key(&slot.request) {
                if !slots.is_empty() && !self.limits.fits(slots.len(), cost, slot.cost) {
                    break;
                }
                cost += u64::from(slot.cost);
                slots.push(*slot);
            }
            queue.pop_front();
            self.slots -= 1;
        }
        slots
    }

    fn take(&mut self, slots: Vec<Slot>) -> Batch<I> {
        let mut items = Vec::with_capacity(slots.len());
        let mut cost = 0;
        for slot in &slots {
            cost += u64::from(slot.cost);
            let request = self.requests.get_mut(&slot.request);
            if let Some(request) = request {
                request.in_flight += 1;
                request.queued_cost -= u64::from(slot.cost);
                items.extend(request.items[slot.index].take());
            }
        }
        debug_assert_eq!(items.len(), slots.len(), "a queued slot of a live request has its item");
        self.queued_cost -= cost;
        self.live_slots -= slots.len();
        let bucket = self.limits.bucket(cost);
        Batch { slots, items, bucket }
    }

    /// Takes what a forward pass gave and returns the requests that it answers.
    ///
    /// Out of memory, or another failure that several requests share, puts the two halves of the batch back, each to be tried by itself:
    /// n images are tried at most 2n − 1 times, and nobody fails for a stranger's image.
    pub fn finish(&mut self, batch: Batch<I>, outcome: Outcome<T>) -> Vec<Done<T>> {
        match outcome {
            Ok(results) if results.len() == batch.slots.len() => self.settle(batch.slots, results),
            Ok(results) => {
                let detail = format!("forward_batch gave {} results for {} images", results.len(), batch.slots.len());
                self.fail(&batch.slots, &EncodeError::Item { index: None, error: ItemError::Internal(detail) })
            }
            Err(error) if self.splits(&batch, &error) => {
                self.split(batch);
                Vec::new()
            }
            Err(error) => {
                let index = (batch.slots.len() == 1).then(|| batch.slots[0].index);
                self.fail(&batch.slots, &blame(error, index))
            }
        }
    }

    fn splits(&self, batch: &Batch<I>, error: &BatchError) -> bool {
        let several = match error {
            BatchError::OutOfMemory => batch.slots.len() > 1,
            BatchError::Invalid(_) | BatchError::Internal(_) => !batch.is_one_request(),
            BatchError::Unavailable(_) | BatchError::DeviceLost(_) => false,
        };
        several && !self.closed
    }

    fn split(&mut self, batch: Batch<I>) {
        let Batch { mut slots, items, .. } = batch;
        for (slot, item) in slots.iter().zip(items) {
            let Some(request) = self.requests.get_mut(&slot.request) else { continue };
            request.items[slot.index] = Some(item);
            request.in_flight -= 1;
            request.queued_cost += u64::from(slot.cost);
            self.queued_cost += u64::from(slot.cost);
            self.live_slots += 1;
        }
        self.slots += slots.len();
        let second = slots.split_off(slots.len() / 2);
        self.retries.push_front(second);
        self.retries.push_front(slots);
    }

    fn settle(&mut self, slots: Vec<Slot>, results: Vec<Result<T, ItemError>>) -> Vec<Done<T>> {
        let mut done = Vec::new();
        for (slot, result) in slots.into_iter().zip(results) {
            let Some(request) = self.requests.get_mut(&slot.request) else { continue };
            match result {
                Ok(result) => {
                    request.results[slot.index] = Some(result);
                    request.unfinished -= 1;
                    request.in_flight -= 1;
                    if request.unfinished == 0 {
                        let results = self.requests.remove(&slot.request).map(|request| request.results);
                        let result = Ok(results.into_iter().flatten().flatten().collect());
                        done.push(Done { request: slot.request, result });
                    }
                }
                Err(error) => {
                    self.bury(slot.request);
                    let error = EncodeError::Item { index: Some(slot.index), error };
                    done.push(Done { request: slot.request, result: Err(error) });
                }
            }
        }
        done
    }

    fn fail(&mut self, slots: &[Slot], error: &EncodeError) -> Vec<Done<T>> {
        let failed = slots.iter().filter(|slot| self.bury(slot.request));
        failed.map(|slot| Done { request: slot.request, result: Err(error.clone()) }).collect()
    }

    /// Forgets a request: its images leave the queue, and results of those in flight are dropped. False when it was answered already.
    pub fn cancel(&mut self, request: RequestId) -> bool {
        self.bury(request)
    }

    /// Frees a request's images at once; its slots stay until they are met or are too many.
    fn bury(&mut self, id: RequestId) -> bool {
        let Some(request) = self.requests.remove(&id) else { return false };
        self.queued_cost -= request.queued_cost;
        self.live_slots -= request.items.iter().flatten().count();
        if self.slots > 2 * self.live_slots + STALE_MAX {
            self.sweep();
        }
        true
    }

    fn sweep(&mut self) {
        let requests = &self.requests;
        let live = |slot: &Slot| requests.contains_key(&slot.request);
        self.queues.values_mut().for_each(|queue| queue.retain(live));
        self.queues.retain(|_, queue| !queue.is_empty());
        self.turns.retain(|key| self.queues.contains_key(key));
        self.retries.iter_mut().for_each(|part| part.retain(live));
        self.retries.retain(|part| !part.is_empty());
        let queued: usize = self.queues.values().map(VecDeque::len).sum();
        self.slots = queued + self.retries.iter().map(Vec::len).sum::<usize>();
    }

    /// Takes no more work. Requests with images in the queue fail; one whose images are all in flight or done may still finish.
    pub fn close(&mut self) -> Vec<Done<T>> {
        self.closed = true;
        let queued = |request: &Request<I, T>| request.unfinished > request.in_flight;
        self.fail_where(queued, &EncodeError::Closed)
    }

    /// Takes no more work and fails every request: the encoder is lost.
    pub fn abort(&mut self, error: &EncodeError) -> Vec<Done<T>> {
        self.closed = true;
        self.fail_where(|_| true, error)
    }

    fn fail_where(&mut self, which: impl Fn(&Request<I, T>) -> bool, error: &EncodeError) -> Vec<Done<T>> {
        let mut ids: Vec<_> = self.requests.iter().filter(|(_, request)| which(request)).map(|(id, _)| *id).collect();
        ids.sort_unstable();
        ids.iter().for_each(|&id| _ = self.bury(id));
        ids.into_iter().map(|request| Done { request, result: Err(error.clone()) }).collect()
    }

    /// Panics when the counts and the queues disagree. O(everything).
    #[cfg(test)]
    pub(crate) fn check_invariants(&self) {
        let queued: u64 = self.requests.values().map(|request| request.queued_cost).sum();
        assert_eq!(self.queued_cost, queued, "queued cost");
        let all = || self.queues.values().flatten().chain(self.retries.iter().flatten());
        assert_eq!(self.slots, all().count(), "slots");
        let live: Vec<_> = all().filter(|slot| self.requests.contains_key(&slot.request)).collect();
        assert_eq!(self.live_slots, live.len(), "live slots");
        assert_eq!(self.queued_cost, live.iter().map(|slot| u64::from(slot.cost)).sum::<u64>(), "cost of live slots");
        let stale = (self.slots - self.live_slots) as u64;
        assert!(stale <= self.limits.max_queued_cost + STALE_MAX as u64, "stale slots are swept");
        assert!(!self.closed || self.live_slots == 0, "nothing waits after close");
        assert_eq!(self.turns.len(), self.queues.len(), "each key has one turn");
        let kept =
            |request: &Request<I, T>| request.items.iter().flatten().count() + request.in_flight == request.unfinished;
        assert!(self.requests.values().all(kept), "an image waits, is in flight, or is done");
    }
}

/// Whose fault a failed batch is, told to each of its requests.
fn blame(error: BatchError, index: Option<usize>) -> EncodeError {
    let error = match error {
        BatchError::OutOfMemory => ItemError::OutOfMemory,
        BatchError::Invalid(message) => ItemError::Invalid(message),
        BatchError::Internal(detail) => ItemError::Internal(detail),
        BatchError::Unavailable(_) | BatchError::DeviceLost(_) => return EncodeError::Unavailable,
    };
    EncodeError::Item { index, error }
}
