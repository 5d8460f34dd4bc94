local actions = {}

if obj.metadata.deletionTimestamp ~= nil then
  return actions
end
if obj.status ~= nil then
  if obj.status.completionTime ~= nil then
    return actions
  end
  for _, condition in ipairs(obj.status.conditions or {}) do
    if (condition.type == "Succeeded" or condition.type == "Failed") and condition.status == "True" then
      return actions
    end
  end
end

if obj.spec.runPolicy ~= nil and obj.spec.runPolicy.suspend then
  actions["resume"] = { ["displayName"] = "Resume", ["iconClass"] = "fa fa-fw fa-play" }
else
  actions["suspend"] = { ["displayName"] = "Suspend", ["iconClass"] = "fa fa-fw fa-pause" }
end
return actions
