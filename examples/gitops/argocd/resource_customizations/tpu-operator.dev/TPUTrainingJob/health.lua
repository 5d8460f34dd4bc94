-- A training is Healthy when it has succeeded, so that later sync waves wait for it, as they do for a Job.
local waiting = { status = "Progressing", message = "waiting for the operator" }

local status = obj.status
if status == nil or status.conditions == nil then
  return waiting
end
if status.observedGeneration ~= nil and status.observedGeneration ~= obj.metadata.generation then
  return waiting
end

local is = {}
for _, condition in ipairs(status.conditions) do
  if condition.status == "True" then
    is[condition.type] = condition
  end
end

local function health(code, condition)
  return { status = code, message = condition.message or condition.reason or "" }
end

if is.Succeeded then
  return health("Healthy", is.Succeeded)
end
if is.Failed then
  return health("Degraded", is.Failed)
end
if is.Stalled and is.Stalled.reason == "InvalidSpec" then
  return health("Degraded", is.Stalled)
end
if is.Suspended then
  return health("Suspended", is.Reconciling or is.Ready or is.Suspended)
end
-- What the cluster refuses, such as a quota, is tried again. Degraded would end the sync for a state that passes.
local shown = is.Stalled or is.Reconciling or is.Ready
if shown then
  return health("Progressing", shown)
end
return waiting
