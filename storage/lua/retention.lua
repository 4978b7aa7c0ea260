-- Shared by write.lua and drop.lua: which entries retention lets go, and letting them go.
-- The frame header's first DIGITS bytes are the number of the last entry that names the frame.

local unpack = unpack or table.unpack
local DIGITS = 12
local KEY_LENGTH = 16
local ENTRY_OVERHEAD = 400 -- bytes of Redis beyond an entry's data and frame keys
local FRAME_OVERHEAD = 200 -- bytes of Redis beyond a frame's payload
local CHUNK = 1000 -- arguments of one command

local function text(number)
  return string.format('%d', number)
end

local function as_table(flat)
  local fields = {}
  for at = 1, #flat, 2 do
    fields[flat[at]] = flat[at + 1]
  end
  return fields
end

local function number(fields, name)
  return tonumber(fields[name]) or 0
end

local function now_ms()
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end

-- Readers in the order of their names, as the state knows them.
local function readers_of(state)
  local readers, now = {}, now_ms()
  for name in string.gmatch(state['readers'] or '', '%S+') do
    local prefix = 'reader:' .. name .. ':'
    local lease_until = tonumber(state[prefix .. 'until'])
    readers[#readers + 1] = {
      name = name,
      kind = state[prefix .. 'kind'],
      capacity = number(state, prefix .. 'capacity_steps'),
      mark = number(state, prefix .. 'mark'),
      allowed = tonumber(state[prefix .. 'allowed_steps']),
      -- One that has never held its lease may be about to: it counts as alive.
      alive = lease_until == nil or lease_until + number(state, 'reader_timeout_ms') > now,
    }
  end
  return readers
end

-- Name of the reader that still wants an entry, '' where no reader is known, nil when it may go.
-- At the byte limit only living queue readers keep an entry.
local function wanted_by(readers, entry, total, steps_after, at_byte_limit)
  for _, reader in ipairs(readers) do
    if reader.kind == 'queue' then
      if reader.mark < entry and (reader.alive or not at_byte_limit) then
        return reader.name
      end
    elseif not at_byte_limit and steps_after - total < reader.capacity then
      return reader.name
    end
  end
  if #readers == 0 and not at_byte_limit then
    return ''
  end
  return nil
end

-- Frames that go with an entry: those whose header names it and that `kept` does not hold.
local function frames_to_delete(frames, entry, prefix, kept)
  local doomed, bytes = {}, 0
  local named = string.format('%012d', entry)
  for at = 1, #frames, KEY_LENGTH do
    local key = string.sub(frames, at, at + KEY_LENGTH - 1)
    if not kept[key] then
      local name = prefix .. key
      if redis.call('GETRANGE', name, 0, DIGITS - 1) == named then
        doomed[#doomed + 1] = name
        bytes = bytes + redis.call('STRLEN', name) + FRAME_OVERHEAD
      end
    end
  end
  return doomed, bytes
end

-- What may be dropped now, oldest first, at most `limit` entries; writes nothing.
-- Returns a plan and, where an entry is in the way of more room, the reader that wants it.
local function plan_drops(state, segments, prefix, readers, steps_after, need_bytes, kept, limit)
  local plan = { freed = 0, entries = {} }
  local capacity = number(state, 'capacity_bytes')
  local bytes = number(state, 'bytes')
  local from, blocker = '-', nil
  while #plan.entries < limit do
    local oldest = redis.call('XRANGE', segments, from, '+', 'COUNT', 1)[1]
    if not oldest then
      break
    end
    local id, fields = oldest[1], as_table(oldest[2])
    local entry = tonumber(string.match(id, '^%d+'))
    local total = number(fields, 'total_steps')
    local reason = 'retention'
    blocker = wanted_by(readers, entry, total, steps_after, false)
    if blocker and capacity > 0 and bytes + need_bytes - plan.freed > capacity then
      reason = 'bytes'
      blocker = wanted_by(readers, entry, total, steps_after, true)
    end
    if blocker then
      break
    end
    local frames = fields['frames'] or ''
    local doomed, frame_bytes = frames_to_delete(frames, entry, prefix, kept)
    local entry_bytes = #(fields['data'] or '') + #frames + ENTRY_OVERHEAD
    plan.freed = plan.freed + entry_bytes + frame_bytes
    plan.entries[#plan.entries + 1] = {
      id = id,
      reason = reason,
      frames = doomed,
      segments = number(fields, 'segments'),
      steps = number(fields, 'steps'),
    }
    from = '(' .. id
  end
  plan.over = capacity > 0 and bytes + need_bytes - plan.freed > capacity
  plan.blocker = blocker
  return plan
end

-- Deletes first and returns the counts for the caller to write: a server that is out of memory
-- refuses HSET until something was deleted.
local function carry_out(plan, state, segments, changed)
  local dropped = { retention = 0, bytes = 0 }
  local frames, segment_count, steps = 0, 0, 0
  for _, entry in ipairs(plan.entries) do
    for at = 1, #entry.frames, CHUNK do
      redis.call('DEL', unpack(entry.frames, at, math.min(at + CHUNK - 1, #entry.frames)))
    end
    redis.call('XDEL', segments, entry.id)
    dropped[entry.reason] = dropped[entry.reason] + 1
    frames = frames + #entry.frames
    segment_count = segment_count + entry.segments
    steps = steps + entry.steps
  end
  if #plan.entries > 0 then
    local function add(name, by)
      if by ~= 0 then
        changed[#changed + 1] = name
        changed[#changed + 1] = text(number(state, name) + by)
      end
    end
    add('dropped_entries', #plan.entries)
    add('dropped_segments', segment_count)
    add('dropped_steps', steps)
    add('dropped_frames', frames)
    add('dropped:retention', dropped.retention)
    add('dropped:bytes', dropped.bytes)
  end
end
