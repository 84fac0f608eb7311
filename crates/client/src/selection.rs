//! Reads a selection: a table of the samples that an epoch delivers, as Parquet or as CSV with a header line.
//!
//! A file that begins with the Parquet magic is Parquet, every other file is CSV. One column names the
//! samples, by key or by number. Another column may weight them. Other columns are ignored.
//!
//! 1. Each row names one sample. A file that names a sample twice, or has a row that names none, is rejected.
//! 2. The server checks that the version has these samples, when the job is declared.
//! 3. A foreign file takes memory for its distinct samples, not for the rows that it claims: a dictionary
//!    and runs name one sample millions of times in a few bytes.

mod parquet_file;

use fletch_api::{PlanBase, WeightOf, Weights};
use fletch_core::{Hash, Kind, manifest::PATH_BYTES_MAX};
use parquet::{basic::Repetition, file::reader::FileReader as _, record::Field, schema::types::Type};
use parquet_file::ParquetFile;
use std::{
    collections::HashSet,
    fs::File,
    io::{self, Read as _, Seek as _},
    panic::{AssertUnwindSafe, catch_unwind},
    path::{Path, PathBuf},
    sync::Arc,
};

/// The most rows of a selection: as many as a plan has entries.
pub const ROWS_MAX: usize = 1 << 31;
/// The most samples that one error lists.
const LISTED_MAX: usize = 5;
/// The most bytes of a key: the path of a shard, and the name of a member in it.
const KEY_BYTES_MAX: usize = 2 * PATH_BYTES_MAX + 1;
/// The most characters of a text that an error shows.
const SHOWN_MAX: usize = 100;
/// The default names of the column of keys and of the column of numbers.
const DEFAULT_COLUMNS: [&str; 2] = ["key", "number"];

/// The names of the columns to read.
#[derive(Debug, Clone, Default)]
pub struct Columns {
    /// The column of sample keys. Without `keys` and `numbers`, the column `key` is read, or else `number`.
    pub keys: Option<String>,
    /// The column of sample numbers, instead of keys.
    pub numbers: Option<String>,
    /// The column of weights. Each weight is finite and at least 0.
    pub weights: Option<String>,
}

/// The samples that a file names, and their weights.
#[derive(Debug, Clone, PartialEq)]
pub struct Selection {
    /// The samples, in the order of the rows.
    pub of: WeightOf,
    /// The weight of each sample, if a column of weights was named.
    pub weights: Option<Vec<f64>>,
}

/// Why a file is not a valid selection.
#[derive(Debug, thiserror::Error)]
pub enum SelectionError {
    /// The file cannot be opened or read.
    #[error("{path}: {error}")]
    Io {
        /// The file.
        path: PathBuf,
        /// The error of the system.
        error: io::Error,
    },
    /// The file is not readable Parquet or CSV.
    #[error("{path}: {why}")]
    Format {
        /// The file.
        path: PathBuf,
        /// The reason.
        why: String,
    },
    /// A column is missing.
    #[error("{path} has no column {column}; it has {}", columns.join(", "))]
    Column {
        /// The file.
        path: PathBuf,
        /// The missing column.
        column: String,
        /// The columns of the file.
        columns: Vec<String>,
    },
    /// Both a column of keys and a column of numbers were named.
    #[error("name a column of keys or a column of numbers, not both")]
    Both,
    /// A value is not valid in its column.
    #[error("{path}, row {row}: {value} in column {column} is not a {what}")]
    Value {
        /// The file.
        path: PathBuf,
        /// The row, from 1. The header line is not counted.
        row: usize,
        /// The column.
        column: String,
        /// The value.
        value: String,
        /// The kind of value that the column needs.
        what: &'static str,
    },
    /// Some samples are named more than once.
    #[error("{path} names {many} samples more than once, among them {}", first.join(", "))]
    Twice {
        /// The file.
        path: PathBuf,
        /// The number of these samples.
        many: usize,
        /// The first few of them, in the order of the rows.
        first: Vec<String>,
    },
    /// The file has no rows.
    #[error("{0} has no rows")]
    Empty(PathBuf),
    /// The file has too many rows.
    #[error("{0} has more than {ROWS_MAX} rows")]
    Long(PathBuf),
}

impl SelectionError {
    /// Returns who can act on the error.
    #[must_use]
    pub fn kind(&self) -> Kind {
        match self {
            SelectionError::Io { error, .. } if error.kind() == io::ErrorKind::NotFound => Kind::NotFound,
            _ => Kind::Invalid,
        }
    }
}

/// The value of one cell.
enum Cell {
    Text(String),
    Whole(i128),
    Real(f64),
    Nothing,
    Other(&'static str),
}

impl Cell {
    fn key(self) -> Result<String, Cell> {
        match self {
            Cell::Text(text) if (1..=KEY_BYTES_MAX).contains(&text.len()) => Ok(text),
            other => Err(other),
        }
    }

    fn number(self) -> Result<u64, Cell> {
        match &self {
            Cell::Text(text) => text.trim().parse().map_err(|_| self),
            Cell::Whole(n) => u64::try_from(*n).map_err(|_| self),
            _ => Err(self),
        }
    }

    fn weight(self) -> Result<f64, Cell> {
        let weight = match &self {
            Cell::Text(text) => text.trim().parse().ok(),
            // Weights are relative: the rounding beyond 2^53 does not matter.
            Cell::Whole(n) => Some(*n as f64),
            Cell::Real(x) => Some(*x),
            Cell::Nothing | Cell::Other(_) => None,
        };
        weight.filter(|w| w.is_finite() && *w >= 0.0).ok_or(self)
    }

    /// Returns the value as an error message shows it.
    fn shown(&self) -> String {
        match self {
            Cell::Text(text) => format!("{:?}", text.chars().take(SHOWN_MAX).collect::<String>()),
            Cell::Whole(n) => n.to_string(),
            Cell::Real(x) => x.to_string(),
            Cell::Nothing => "nothing".to_owned(),
            Cell::Other(what) => format!("a {what}"),
        }
    }
}

impl From<&Field> for Cell {
    fn from(field: &Field) -> Self {
        match field {
            Field::Null => Cell::Nothing,
            Field::Str(text) => Cell::Text(text.clone()),
            Field::Bytes(bytes) => match std::str::from_utf8(bytes.data()) {
                Ok(text) => Cell::Text(text.to_owned()),
                Err(_) => Cell::Other("text that is not UTF-8"),
            },
            Field::Byte(n) => Cell::Whole((*n).into()),
            Field::Short(n) => Cell::Whole((*n).into()),
            Field::Int(n) => Cell::Whole((*n).into()),
            Field::Long(n) => Cell::Whole((*n).into()),
            Field::UByte(n) => Cell::Whole((*n).into()),
            Field::UShort(n) => Cell::Whole((*n).into()),
            Field::UInt(n) => Cell::Whole((*n).into()),
            Field::ULong(n) => Cell::Whole((*n).into()),
            Field::Float(x) => Cell::Real((*x).into()),
            Field::Double(x) => Cell::Real(*x),
            _ => Cell::Other("value of another type"),
        }
    }
}

/// The columns that are read: of samples (with `true` for keys), and of weights.
struct ColumnChoice {
    samples: (String, bool),
    weights: Option<String>,
}

impl ColumnChoice {
    fn new(path: &Path, columns: &Columns, found: &[String]) -> Result<Self, SelectionError> {
        let has = |name: &str| found.iter().any(|f| f == name);
        let samples = match (&columns.keys, &columns.numbers) {
            (Some(_), Some(_)) => return Err(SelectionError::Both),
            (Some(name), None) => (name.clone(), true),
            (None, Some(name)) => (name.clone(), false),
            (None, None) if has(DEFAULT_COLUMNS[0]) => (DEFAULT_COLUMNS[0].to_owned(), true),
            (None, None) if has(DEFAULT_COLUMNS[1]) => (DEFAULT_COLUMNS[1].to_owned(), false),
            (None, None) => (DEFAULT_COLUMNS.join(" or "), true),
        };
        for name in std::iter::once(&samples.0).chain(&columns.weights) {
            if !has(name) {
                let (path, column, columns) = (path.to_owned(), name.clone(), found.to_vec());
                return Err(SelectionError::Column { path, column, columns });
            }
        }
        Ok(ColumnChoice { samples, weights: columns.weights.clone() })
    }
}

/// The samples of the rows so far, and those that were named more than once.
#[derive(Default)]
struct Named {
    seen: HashSet<Hash>,
    again: HashSet<Hash>,
    /// The first samples that were named again.
    first: Vec<String>,
}

impl Named {
    /// Returns whether no row had this name before.
    fn is_new(&mut self, name: String) -> bool {
        let hash = Hash::of(name.as_bytes());
        let is_new = self.seen.insert(hash);
        if !is_new && self.again.insert(hash) && self.first.len() < LISTED_MAX {
            self.first.push(name);
        }
        is_new
    }
}

/// Collects the rows of a file.
struct SelectionBuilder<'a> {
    path: &'a Path,
    chosen: ColumnChoice,
    of: WeightOf,
    weights: Vec<f64>,
    rows: usize,
    named: Named,
}

impl<'a> SelectionBuilder<'a> {
    fn new(path: &'a Path, chosen: ColumnChoice) -> Self {
        let of = if chosen.samples.1 { WeightOf::Keys(Vec::new()) } else { WeightOf::Samples(Vec::new()) };
        SelectionBuilder { path, chosen, of, weights: Vec::new(), rows: 0, named: Named::default() }
    }

    fn row(&mut self, sample: Cell, weight: Option<Cell>) -> Result<(), SelectionError> {
        self.rows += 1;
        if self.rows > ROWS_MAX {
            return Err(SelectionError::Long(self.path.to_owned()));
        }
        let (path, row) = (self.path, self.rows);
        let invalid = |column: &str, what| {
            let (path, column) = (path.to_owned(), column.to_owned());
            move |cell: Cell| SelectionError::Value { path, row, column, value: cell.shown(), what }
        };
        let column = &self.chosen.samples.0;
        match &mut self.of {
            WeightOf::Keys(keys) => {
                let key = sample.key().map_err(invalid(column, "key"))?;
                if self.named.is_new(format!("{key:?}")) {
                    keys.push(key);
                }
            }
            WeightOf::Samples(numbers) => {
                let number = sample.number().map_err(invalid(column, "sample number"))?;
                if self.named.is_new(number.to_string()) {
                    numbers.push(number);
                }
            }
        }
        if let (Some(cell), Some(column)) = (weight, &self.chosen.weights) {
            self.weights.push(cell.weight().map_err(invalid(column, "weight (finite, at least 0)"))?);
        }
        Ok(())
    }

    fn finish(self) -> Result<Selection, SelectionError> {
        let Named { again, first, .. } = self.named;
        if self.rows == 0 {
            return Err(SelectionError::Empty(self.path.to_owned()));
        }
        if !again.is_empty() {
            return Err(SelectionError::Twice { path: self.path.to_owned(), many: again.len(), first });
        }
        let weights = self.chosen.weights.is_some().then_some(self.weights);
        Ok(Selection { of: self.of, weights })
    }
}

impl Selection {
    /// Reads a selection from a file. Blocking.
    ///
    /// # Errors
    /// [`SelectionError`].
    pub fn read(path: &Path, columns: &Columns) -> Result<Self, SelectionError> {
        let io = |error| SelectionError::Io { path: path.to_owned(), error };
        let mut file = File::open(path).map_err(io)?;
        let mut magic = Vec::new();
        (&mut file).take(4).read_to_end(&mut magic).map_err(io)?;
        file.rewind().map_err(io)?;
        if magic == b"PAR1" {
            // The parquet crate has assertions that a damaged file can reach.
            let read = catch_unwind(AssertUnwindSafe(|| Selection::read_parquet(path, columns, file)));
            let why =
                || "the parquet decoder panicked on the file; write it again, or write it as CSV".to_owned();
            return read
                .unwrap_or_else(|_| Err(SelectionError::Format { path: path.to_owned(), why: why() }));
        }
        Selection::read_csv(path, columns, file)
    }

    fn read_parquet(path: &Path, columns: &Columns, file: File) -> Result<Self, SelectionError> {
        let bad = |e: parquet::errors::ParquetError| SelectionError::Format {
            path: path.to_owned(),
            why: format!(
                "it cannot be read as Parquet ({e}); write it with snappy or no compression, or as CSV"
            ),
        };
        let named = [&columns.keys, &columns.numbers, &columns.weights];
        let wanted =
            |name: &str| DEFAULT_COLUMNS.contains(&name) || named.iter().any(|n| n.as_deref() == Some(name));
        let reader = ParquetFile::open(file, wanted).map_err(bad)?;
        let schema = reader.metadata().file_metadata().schema();
        let found: Vec<String> = schema.get_fields().iter().map(|f| f.name().to_owned()).collect();
        let mut build = SelectionBuilder::new(path, ColumnChoice::new(path, columns, &found)?);
        let names = std::iter::once(&build.chosen.samples.0).chain(&build.chosen.weights);
        let names: Vec<String> = names.cloned().collect();
        let fields = schema.get_fields().iter().filter(|f| names.iter().any(|n| n == f.name()));
        let fields: Vec<Arc<Type>> = fields.cloned().collect();
        let is_list = |f: &Type| !f.is_primitive() || f.get_basic_info().repetition() == Repetition::REPEATED;
        if let Some(list) = fields.iter().find(|f| is_list(f)) {
            let why = format!("the column {} has lists or groups; give one with a value a row", list.name());
            return Err(SelectionError::Format { path: path.to_owned(), why });
        }
        let wanted = Type::group_type_builder(schema.name()).with_fields(fields).build().map_err(bad)?;
        for row in reader.get_row_iter(Some(wanted)).map_err(bad)? {
            let row = row.map_err(bad)?;
            let cell = |name: &str| {
                row.get_column_iter().find(|(n, _)| *n == name).map_or(Cell::Nothing, |(_, f)| Cell::from(f))
            };
            build.row(cell(&names[0]), names.get(1).map(|n| cell(n)))?;
        }
        build.finish()
    }

    fn read_csv(path: &Path, columns: &Columns, file: File) -> Result<Self, SelectionError> {
        let bad = |e: csv::Error| SelectionError::Format { path: path.to_owned(), why: e.to_string() };
        let mut reader = csv::Reader::from_reader(file);
        let found: Vec<String> = reader.headers().map_err(bad)?.iter().map(str::to_owned).collect();
        let mut build = SelectionBuilder::new(path, ColumnChoice::new(path, columns, &found)?);
        let at = |name: &String| found.iter().position(|f| f == name).unwrap_or(usize::MAX);
        let (sample, weight) = (at(&build.chosen.samples.0), build.chosen.weights.as_ref().map(at));
        let mut record = csv::StringRecord::new();
        while reader.read_record(&mut record).map_err(bad)? {
            let cell = |i: usize| record.get(i).map_or(Cell::Nothing, |text| Cell::Text(text.to_owned()));
            build.row(cell(sample), weight.map(cell))?;
        }
        build.finish()
    }

    /// Returns the number of samples.
    #[must_use]
    pub fn len(&self) -> usize {
        match &self.of {
            WeightOf::Keys(keys) => keys.len(),
            WeightOf::Samples(numbers) => numbers.len(),
        }
    }

    /// Returns whether there are no samples. A selection that was read has at least one.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the plan of the selection.
    ///
    /// Each sample once or, with weights, `draws` samples in their proportion. `draws` defaults to the number
    /// of rows.
    #[must_use]
    pub fn base(self, draws: Option<u64>) -> PlanBase {
        let draws = draws.unwrap_or(self.len() as u64);
        match (self.weights, self.of) {
            (None, WeightOf::Keys(keys)) => PlanBase::Keys(keys),
            (None, WeightOf::Samples(numbers)) => PlanBase::Samples(numbers),
            (Some(weights), of) => {
                let weights = weights.into_iter().map(Some).collect();
                PlanBase::Weights(Weights { weights, draws, of: Some(of) })
            }
        }
    }
}

#[cfg(test)]
mod tests;
