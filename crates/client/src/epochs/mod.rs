//! Epochs over HTTP: declares jobs, receives leases, acknowledges them, checks receipts (`docs/EPOCHS.md`).
//!
//! ```text
//! Client::declare ─► JobHandle ─► reader(epoch, rank, worker) ─► next(want) ─► LeaseBatch { token, samples }
//!                       │                                                        │ consumed
//!                       └─ ack(epoch, rank, [token.ack()]) ◀─────────────────────┘
//! ```
//!
//! - `job` has the calls about a job and its epochs.
//! - `reader` requests leases, and `stream` decodes one answer.
//! - `lease` has the values that a reader hands out, `held` the leases to renew and to release.
//! - `loader` has the name of this process, which its requests carry.
//! - `request` is one lease request under way, and `journal` lists the leases of a process for another one.
//! - `received_sum` checks a receipt.
//! - `rank_records` keeps what this process consumed, and `reclaim` gives it to the next server if the job's
//!   server is lost.
//!
//! 1. (I1) A reader hands out a sample only if each of its files hashes to the value that the server
//!    announced. The receipt proves that the version has these files.
//! 2. (I2) A batch is one whole lease. After a broken stream the reader asks again with the same sequence
//!    number. If the lease is gone by then, the reader discards the samples it had received of it.
//! 3. A lease that was handed out stays held until it was acknowledged ([`HeldLeases::forget`]) or its
//!    samples will not be used ([`HeldLeases::release`]). Held leases expire unless [`JobHandle::keep_alive`]
//!    runs.
//! 4. A lease that was received and not handed out is released.

mod held;
mod job;
mod journal;
mod lease;
mod loader;
mod rank_records;
mod reader;
mod received_sum;
mod reclaim;
mod request;
mod stream;

pub use held::HeldLeases;
pub use job::{JobHandle, JobsOfAll};
pub use journal::LeaseJournal;
pub use lease::{AckToken, GrantRecord, LeaseBatch, LeasedSample, Next};
pub use rank_records::RankRecords;
pub use reader::{EpochReader, LEASES_AHEAD_MAX};
pub use received_sum::ReceivedSum;
