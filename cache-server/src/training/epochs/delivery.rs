//! Delivery: through which sources a granted sample is read, and as what its bytes count.
//!
//! 1. A sample that was asked for by name is read through the job's own layout, and counts as an exact hit or
//!    a miss.
//! 2. A sample that the sweep chose is read through the sweep's share of the disk while its unit stays there;
//!    a sample whose unit has left is read directly, and the cache keeps nothing of it.
//! 3. (I8) Bytes that were fetched for this epoch count as misses, although they are read from the cache;
//!    bytes that another epoch left there count as substituted hits.

use super::{Epoch, JobError, JobSetup};
use crate::{
    data::{
        read_ahead::READ_AHEAD_BYTES_MAX,
        reads::{ContentError, Payer, Reads, Span, SpanBytes, spans},
        versions::{Source, Sources, VersionError, Versions},
    },
    tenancy::accounting::Cost,
    training::{prefetch::Prefetcher, sweep::DeliveryClass},
};
use fletch_api::{ByteResult, RefPiece, SampleRef};
use fletch_core::{manifest::locate::ranges, plan::Item};
use fletch_store::ReaderKind;
use fletch_tables::Found;
use futures::{StreamExt as _, stream::BoxStream};
use std::sync::Arc;

/// The bytes of a sample, in order.
pub enum SampleBytes {
    /// They were read already.
    Buffered(Vec<SpanBytes>),
    /// They are many, and are read while they are sent.
    Streamed(BoxStream<'static, Result<SpanBytes, ContentError>>),
}

/// Reads granted samples of one epoch.
#[derive(Clone)]
pub struct Delivery {
    setup: Arc<JobSetup>,
    source: Arc<Source>,
    prefetcher: Option<Arc<Prefetcher>>,
}

impl Delivery {
    /// Begins a delivery of an epoch's samples from `source`, which is the job's version in its layout.
    ///
    /// Notes that the dataset is read now, which gives it a share of the disk. (A sweep notes it by itself.)
    #[must_use]
    pub fn new(setup: &Arc<JobSetup>, source: &Arc<Source>, epoch: &Epoch, now_ns: u64) -> Self {
        if setup.sweep.is_none() {
            let (ids, root) = (setup.exact.version_ids_in(source), source.version.root());
            setup.context.sweep.shares.note(ids, root, source.footprint(), ReaderKind::Ordered, now_ns);
        }
        Delivery { setup: Arc::clone(setup), source: Arc::clone(source), prefetcher: epoch.prefetcher() }
    }

    /// The sources through which a sample of a class is read.
    fn sources_for(&self, class: DeliveryClass) -> &Arc<Sources> {
        match (&self.setup.sweep, class) {
            (None, _) | (_, DeliveryClass::Exact) => &self.setup.exact,
            (Some(sweep), DeliveryClass::Direct) => &sweep.uncached_sources,
            (Some(sweep), _) => &sweep.kept_sources,
        }
    }

    /// The class of a sample as it is read now: a unit that left after the grant is not fetched again for it.
    #[must_use]
    pub fn class_now(&self, item: Item, granted: DeliveryClass) -> DeliveryClass {
        match (&self.setup.sweep, granted) {
            (Some(sweep), DeliveryClass::Fetched | DeliveryClass::Substituted)
                if !sweep.stays(item.sample) =>
            {
                DeliveryClass::Direct
            }
            _ => granted,
        }
    }

    /// Reads a sample: now if it is small, while it is sent otherwise. Returns its class after that.
    ///
    /// Waits for the prefetch of the entry, if one is under way. Prefetched bytes that are read while they
    /// are sent stay until the entry is acknowledged.
    ///
    /// # Errors
    /// [`ContentError`].
    pub async fn read(
        &self,
        reads: &Arc<Reads>,
        payer: &Payer,
        entry: u32,
        files: &[Found],
        class: DeliveryClass,
    ) -> Result<(DeliveryClass, SampleBytes), ContentError> {
        let class = match &self.prefetcher {
            Some(prefetcher) if prefetcher.ready(entry).await => DeliveryClass::Fetched,
            _ => class,
        };
        let sources = self.sources_for(class);
        let len: u64 = files.iter().map(|f| f.entry().size).sum();
        let spans: Vec<Span> = files.iter().flat_map(|f| spans(&self.source, f, 0..f.entry().size)).collect();
        if len > READ_AHEAD_BYTES_MAX {
            return Ok((class, SampleBytes::Streamed(reads.spans(payer, sources, spans).boxed())));
        }
        let in_memory = spans.iter().map(|span| reads.span_in_memory(sources, span)).collect();
        let bytes = match in_memory {
            Some(bytes) => bytes,
            None => reads.buffered(payer, sources, spans).await?,
        };
        if let Some(prefetcher) = &self.prefetcher {
            prefetcher.served(&[entry]);
        }
        Ok((class, SampleBytes::Buffered(bytes)))
    }

    /// Tells the sweep that a sample was read, whatever came of the read.
    pub fn was_read(&self, item: Item, granted: DeliveryClass) {
        if let (Some(sweep), DeliveryClass::Fetched | DeliveryClass::Substituted) =
            (&self.setup.sweep, granted)
        {
            sweep.served(item.sample);
        }
    }

    /// What a read's bytes count as.
    #[must_use]
    pub fn cost(class: DeliveryClass, (result, tier): Cost) -> Cost {
        let result = match (class, result) {
            (DeliveryClass::Substituted, ByteResult::Hit) => ByteResult::Substituted,
            (DeliveryClass::Fetched, ByteResult::Hit) => ByteResult::Miss,
            (_, result) => result,
        };
        (result, tier)
    }

    /// The ordinal of a sample's first entry.
    #[must_use]
    pub fn ordinal(&self, sample: u32) -> u64 {
        self.setup.samples.ordinals(sample).0
    }

    /// The files of a sample.
    ///
    /// # Errors
    /// [`JobError`]: the version's tables cannot be read.
    pub async fn files(&self, sample: u32) -> Result<Vec<Found>, JobError> {
        Ok(self.setup.samples.files(&self.source, sample).await?)
    }

    /// The chunks in which the bytes of `files` lie, in order.
    ///
    /// # Errors
    /// [`VersionError`].
    pub async fn locate(
        &self,
        versions: &Arc<Versions>,
        files: &[Found],
        class: DeliveryClass,
    ) -> Result<SampleRef, VersionError> {
        let mut sample = SampleRef { pieces: Vec::new(), owner: String::new() };
        for found in files {
            for r in ranges(found.slices(), 0..found.entry().size) {
                let located = versions.locate(self.sources_for(class), r.slice.chunk).await?;
                let number = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
                sample.pieces.push(RefPiece {
                    chunk: r.slice.chunk,
                    chunk_len: located.len,
                    offset: number(r.range.start),
                    len: number(r.range.len()),
                });
            }
        }
        Ok(sample)
    }
}
