//! What is observed of a job and of what serves it.

/// One batch of one rank, as its acknowledgement and its lease tell. Times are seconds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BatchObservation {
    /// The ordinal of the step, the same for all ranks.
    pub step: u64,
    /// The rank.
    pub rank: u32,
    /// The process that received and prepared the batch: a worker of the loader, numbered over all ranks.
    pub lane: u32,
    /// When the step ended, by one clock for all ranks.
    pub ended: f64,
    /// How long the loop waited for the batch.
    pub waited: f64,
    /// How long the lane waited for its lease: from asking until the last byte, less what it received while
    /// it prepared another batch. `None` if nobody knows it.
    pub received: Option<f64>,
    /// How long the batch was prepared: decoded, transformed and collated.
    pub prepared: f64,
    /// How long the step took, from the batch to the next one being asked for.
    pub stepped: f64,
    /// How long the device computed, if the framework can tell.
    pub device: Option<f64>,
    /// How long the lease was blocked on the origin.
    pub origin: f64,
    /// How long the lease was blocked on the disk.
    pub disk: f64,
    /// How long the lease was in the server's own queue.
    pub queue: f64,
    /// The part of the batch that was in the cache.
    pub hit_part: f64,
}

/// One request that a link or disk served.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Served {
    /// When it was asked, in seconds.
    pub start: f64,
    /// When it was answered, in seconds.
    pub end: f64,
    /// How much it brought, in samples.
    pub samples: f64,
}

/// Everything that is observed over a window of steps.
#[derive(Debug, Clone, Copy)]
pub struct Window<'a> {
    /// The batches, in any order.
    pub batches: &'a [BatchObservation],
    /// The requests to the origin, in any order.
    pub link: &'a [Served],
    /// The reads of the disk, in any order.
    pub disk: &'a [Served],
    /// Requests that ended before this time are forgotten, in seconds on the clock of the batches.
    pub since: f64,
    /// The time from a request to its first byte, in seconds.
    pub first_byte: f64,
    /// The samples of a batch of one rank.
    pub samples: f64,
    /// Whether the training loop itself prepares the batches, without workers.
    pub decodes_in_loop: bool,
}
