-- Write one entry with its frames, and drop what retention lets go: whole or not at all.
-- KEYS: 1 {EXP:SHARD}:state   2 {EXP:SHARD}:segments   3 {EXP:SHARD}:writer:AGENT
--       and, of the same slot, {EXP:SHARD}:frame:* (prefix in ARGV 2)
-- ARGV: 1 creation id   2 frame prefix   3 agent   4 incarnation   5 sequence   6 nonce
--       7 learner   8 fence   9 version   10 segments   11 steps   12 episodes
--       13 frame keys, end to end   14 data   15 "1" accepts a gap   16… frame key, payload, …
-- Every check comes before the first write. The answers, in the order of the checks:
--       unknown experiment, superseded, already written, expected, wait, drop, full, missing, written
--#include retention.lua
local DROPS = 4

local state = as_table(redis.call('HGETALL', KEYS[1]))
local creation_id, prefix, frames, data = ARGV[1], ARGV[2], ARGV[13], ARGV[14]
if state['creation_id'] ~= creation_id then
  return { 'unknown experiment' }
end

local incarnation, sequence, steps = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[11])
local writer = redis.call('HMGET', KEYS[3], 'incarnation', 'sequence')
local known = tonumber(writer[1] or 0) or 0
if known > incarnation then
  return { 'superseded' }
end
local written = known == incarnation and tonumber(writer[2] or 0) or 0
local entry = number(state, 'entry')
if sequence <= written then
  return { 'already written', text(entry) }
end
local gap = sequence - written - 1
if gap > 0 and ARGV[15] ~= '1' then
  return { 'expected', text(written + 1) }
end

local readers = readers_of(state)
local steps_before = number(state, 'steps')
for _, reader in ipairs(readers) do
  local nothing_open = reader.kind == 'queue' and reader.mark >= entry
  if reader.allowed and reader.alive and not nothing_open and steps_before + steps > reader.allowed then
    return { 'wait', reader.name, text(steps_before), text(reader.allowed) }
  end
end

-- What is there already, what comes with this call, what is missing.
local payloads, names, kept = {}, {}, {}
for at = 16, #ARGV, 2 do
  payloads[ARGV[at]] = ARGV[at + 1]
end
for at = 1, #frames, KEY_LENGTH do
  local key = string.sub(frames, at, at + KEY_LENGTH - 1)
  if not kept[key] then
    kept[key] = true
    names[#names + 1] = key
  end
end
local there, all_there = {}, true
for at = 1, #names, CHUNK do
  local chunk = {}
  for index = at, math.min(at + CHUNK - 1, #names) do
    chunk[#chunk + 1] = prefix .. names[index]
  end
  if redis.call('EXISTS', unpack(chunk)) ~= #chunk then
    all_there = false
  end
end
local missing, need_bytes, new_frames = {}, #data + #frames + ENTRY_OVERHEAD, 0
for _, key in ipairs(names) do
  there[key] = all_there or redis.call('EXISTS', prefix .. key) == 1
  if not there[key] then
    if payloads[key] then
      need_bytes = need_bytes + #payloads[key] + FRAME_OVERHEAD
      new_frames = new_frames + 1
    else
      missing[#missing + 1] = key
    end
  end
end

-- Nothing can be dropped while the live steps fit the windows and the bytes fit the limit.
local plan = { entries = {}, freed = 0, over = false }
local steps_after = steps_before + steps
local capacity = number(state, 'capacity_bytes')
local largest_window = 0
for _, reader in ipairs(readers) do
  largest_window = math.max(largest_window, reader.capacity)
end
if (#readers > 0 and steps_after - number(state, 'dropped_steps') > largest_window)
  or (capacity > 0 and number(state, 'bytes') + need_bytes > capacity) then
  plan = plan_drops(state, KEYS[2], prefix, readers, steps_after, need_bytes, kept, DROPS)
end
local live = entry - number(state, 'dropped_entries') - #plan.entries
if plan.over and live > 0 then
  if plan.blocker then
    return { 'full', plan.blocker }
  end
  return { 'drop' }
end

if #missing > 0 then
  return { 'missing', unpack(missing, 1, math.min(#missing, 7000)) }
end

-- From here on nothing is refused. XADD comes first: it is what an out-of-memory server refuses.
entry = entry + 1
redis.call('XADD', KEYS[2], text(entry) .. '-0',
  'agent', ARGV[3], 'incarnation', ARGV[4], 'sequence', ARGV[5], 'learner', ARGV[7],
  'fence', ARGV[8], 'version', ARGV[9], 'segments', ARGV[10], 'steps', ARGV[11],
  'episodes', ARGV[12], 'total_steps', text(steps_after), 'nonce', ARGV[6],
  'previous', state['nonce'] or '', 'frames', frames, 'data', data)
local named = string.format('%012d', entry)
for _, key in ipairs(names) do
  if there[key] then
    redis.call('SETRANGE', prefix .. key, 0, named)
  else
    redis.call('SET', prefix .. key, named .. string.sub(payloads[key], DIGITS + 1))
  end
end
redis.call('HSET', KEYS[3], 'incarnation', ARGV[4], 'sequence', ARGV[5], 'entry', text(entry))
local changed = {
  'entry', text(entry),
  'nonce', ARGV[6],
  'segments', text(number(state, 'segments') + tonumber(ARGV[10])),
  'steps', text(steps_after),
  'episodes', text(number(state, 'episodes') + tonumber(ARGV[12])),
  'bytes', text(number(state, 'bytes') + need_bytes - plan.freed),
  'frames_written', text(number(state, 'frames_written') + new_frames),
  'frames_deduplicated', text(number(state, 'frames_deduplicated') + #names - new_frames),
}
if gap > 0 then
  changed[#changed + 1] = 'gaps'
  changed[#changed + 1] = text(number(state, 'gaps') + gap)
end
carry_out(plan, state, KEYS[2], changed)
redis.call('HSET', KEYS[1], unpack(changed))
return { 'written', text(entry) }
